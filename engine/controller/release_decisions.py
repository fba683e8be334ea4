"""What people may ask of releases: start, approve, hold, promote, restore, roll back, lift, freeze.

Knows what is refused and why: a person may skip score and canary, but never a tombstone, the
effect probe, the catalog row or a freeze. A freeze lets rollbacks through.
"""

import time
import uuid
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from engine.catalog.catalog import Catalog, Notice, Release, Route, Tombstone
from engine.controller.advance import SKIPPABLE, Action, Evidence
from engine.controller.apply import Applier
from engine.errors import ConfigError, Conflict, NotFound
from engine.settings.model import explain
from engine.settings.params import ReleaseConfig

FREEZE = "freeze"


class ReleaseDecisions:
    """Serves people's requests; `latest` is the newest evidence for each running release."""

    def __init__(
        self, catalog: Catalog, applier: Applier, defaults: ReleaseConfig, latest: dict[str, Evidence]
    ):
        self._catalog = catalog
        self._applier, self._changes = applier, applier.changes
        self._defaults = defaults
        self._latest = latest

    def start(
        self, policy: str, digest: str, settings: dict[str, Any], skip_gates: dict[str, str], by: str
    ) -> Release:
        """Start a release, or return the one that runs for the same revision.

        Raises `NotFound`, `ConfigError` for settings or gates that do not exist, and `Conflict` for a
        buried revision, the champion itself, or while another release of the policy runs.
        """
        revision = self._catalog.revisions.get(policy, digest)
        for release in self._catalog.releases.all(policy, open_only=True):
            if release.revision == revision.digest:
                return release
        self._refuse_buried(policy, revision.digest)
        champion = self._catalog.routes.get(policy).champion
        if champion == revision.digest:
            raise Conflict(f"Revision {champion[:12]} is the champion of {policy!r} already.")
        config = self._settings(settings)
        now = time.time()
        release = Release(
            id=str(uuid.uuid4()),
            policy=policy,
            revision=revision.digest,
            baseline=champion,
            step="probe",
            weight=config.weight,
            state="running",
            settings=config.model_dump(mode="json"),
            created_at=now,
            updated_at=now,
            skip_gates={gate: {"by": by, "reason": _skip(gate, why)} for gate, why in skip_gates.items()},
        )
        self._catalog.releases.add(release)
        return release

    def approve(self, release_id: str, by: str, reason: str) -> Release:
        """Let a release that waits for approval go to users; the first approval counts.

        Raises `Conflict` when it has ended, or does not wait for anybody.
        """
        release = self._catalog.releases.get(release_id)
        if release.approved:
            return release
        if release.state != "running" or release.step != "approval":
            raise Conflict(
                f"Release {release_id} does not wait for approval: "
                f"it is {release.state}, at {release.step!r}."
            )
        approved = {"by": by, "reason": reason, "at": time.time()}
        return self._catalog.releases.update(release.id, release.version, approved=approved)

    def hold(self, release_id: str, by: str, reason: str) -> Release:
        """End a running release without a change of champion; one that has ended stays as it is.

        While frozen, a canary that users see stays: `Conflict`. It can be rolled back.
        """
        release = self._catalog.releases.get(release_id)
        if release.state != "running":
            return release
        if self._catalog.routes.get(release.policy).canary == release.revision:
            self.refuse_frozen()
        return self._applier.apply(release, Action("hold", reason), self._evidence(release), by)

    def promote(self, policy: str, digest: str, by: str, reason: str) -> Route:
        """Make a revision the champion now; its own release ends promoted, another one held."""
        revision = self._catalog.revisions.get(policy, digest)
        self._refuse_buried(policy, revision.digest)
        self.refuse_frozen()
        if revision.base != self._catalog.policies.get(policy).base:
            raise Conflict(f"Revision {revision.digest[:12]} of {policy!r} stands on another base.")
        if not (revision.probe or {}).get("accepted", False):
            raise Conflict(
                f"The effect probe has not accepted revision {revision.digest[:12]} of {policy!r}. "
                "Verify it first."
            )
        for release in self._catalog.releases.all(policy, open_only=True):
            ours = release.revision == revision.digest
            action = Action("promote", reason) if ours else Action("hold", f"Superseded by {by}: {reason}")
            self._applier.apply(release, action, self._evidence(release), by)
        route = self._changes.promote(policy, revision.digest, reason, by)
        self._changes.say_by_hand("promote", policy, revision.digest, by, reason, f"promote/{route.version}")
        return route

    def restore(self, policy: str, digest: str | None, by: str, reason: str) -> Route:
        """Make an earlier revision the champion again; without a digest the route's `previous`.

        Raises `NotFound` when there is no earlier one, and what `promote` raises.
        """
        wanted = digest or self._catalog.routes.get(policy).previous
        if not wanted:
            raise NotFound(f"Policy {policy!r} has no earlier champion to go back to; name a revision.")
        return self.promote(policy, wanted, by, reason)

    def rollback(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """Bury a revision now, whatever it is: champion, canary or neither."""
        revision = self._catalog.revisions.get(policy, digest)
        stone = self._changes.withdraw(policy, revision.digest, reason, by)
        for release in self._catalog.releases.all(policy, open_only=True):
            if release.revision == revision.digest:
                self._applier.apply(release, Action("rollback", stone.reason), self._evidence(release), by)
                return stone
        about = f"rollback/{stone.at}"
        self._changes.say_by_hand("rollback", policy, revision.digest, stone.by, stone.reason, about)
        return stone

    def lift(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """End a tombstone; the route stays as it is."""
        revision = self._catalog.revisions.get(policy, digest)
        return self._changes.lift(policy, revision.digest, by, reason)

    def freeze(self, by: str, reason: str) -> str:
        """Let no pointer move but rollbacks, until `thaw`; return the sentence that others get."""
        self._switch(True, by, reason)
        return self.frozen() or ""

    def thaw(self, by: str, reason: str) -> None:
        self._switch(False, by, reason)

    def frozen(self) -> str | None:
        """Return why nothing but rollbacks moves now, or None."""
        if not self._catalog.switches.is_on(FREEZE):
            return None
        said = self._catalog.notices.newest("graftwork.frozen")
        why = f" {said.reason}" if said else ""
        return f"Releases are frozen{why}. Only rollbacks go through until `graftwork thaw`."

    def refuse_frozen(self) -> None:
        if why := self.frozen():
            raise Conflict(why)

    def _switch(self, on: bool, by: str, reason: str) -> None:
        if self._catalog.switches.is_on(FREEZE) != on:
            name = "graftwork.frozen" if on else "graftwork.thawed"
            notice = Notice(str(uuid.uuid4()), name, "", None, f"by {by}: {reason}", "", time.time())
            self._catalog.notices.add(notice)
            self._catalog.switches.set(FREEZE, on)

    def _evidence(self, release: Release) -> Evidence:
        now, route = time.time(), self._catalog.routes.get(release.policy)
        known = self._latest.get(release.id)
        return replace(known, now=now, route=route) if known else Evidence(now, route)

    def _refuse_buried(self, policy: str, digest: str) -> None:
        stone = self._catalog.tombstones.find(policy, digest)
        if stone:
            raise Conflict(
                f"Revision {digest[:12]} of {policy!r} has a tombstone: {stone.reason} "
                "Lift it first (`graftwork lift`), with your name and a reason."
            )

    def _settings(self, changes: dict[str, Any]) -> ReleaseConfig:
        try:
            return ReleaseConfig.model_validate(self._defaults.model_dump() | changes)
        except ValidationError as error:
            raise ConfigError(
                f"The release's settings are not valid. {explain(error, ReleaseConfig)}"
            ) from None


def _skip(gate: str, reason: str) -> str:
    if gate not in SKIPPABLE:
        raise ConfigError(f"The gate {gate!r} cannot be skipped; only these can: {', '.join(SKIPPABLE)}.")
    if not reason.strip():
        raise ConfigError(f"Skipping the {gate} gate needs a reason.")
    return reason
