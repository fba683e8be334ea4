"""Decisions that people make: start, approve, pause, hold, promote, restore, roll back, lift, freeze.

A person may skip score, shadow and canary, but never a tombstone, the effect probe or a freeze. A freeze and
a pause allow rollbacks.
"""

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from engine.catalog.catalog import Catalog, Notice, Release, Revision, Route, Tombstone
from engine.controller.advance import SKIPPABLE, Action, Evidence
from engine.controller.apply import Applier
from engine.errors import ConfigError, Conflict, NotFound
from engine.settings.model import explain
from engine.settings.releases import ReleaseConfig

FREEZE = "freeze"


Decision = TypeVar("Decision", bound=Callable[..., Any])


def _one_at_a_time(decide: Decision) -> Decision:
    @wraps(decide)
    def locked(self: "ReleaseDecisions", *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return decide(self, *args, **kwargs)

    return cast(Decision, locked)


class ReleaseDecisions:
    """Checks and carries out people's decisions; `latest` holds each running release's newest evidence.

    Each holds `lock`, and so does the loop while it judges a release.
    """

    def __init__(
        self,
        catalog: Catalog,
        applier: Applier,
        configured: Callable[[str], ReleaseConfig],
        latest: dict[str, Evidence],
    ):
        self._catalog = catalog
        self._applier, self._changes = applier, applier.changes
        self._configured = configured
        self._latest = latest
        self.lock = threading.RLock()

    @_one_at_a_time
    def start(
        self,
        policy: str,
        digest: str,
        settings: dict[str, Any],
        skip_gates: dict[str, str],
        by: str,
        replaces: bool = False,
    ) -> Release:
        """Start a release, or return the running one of the same revision.

        It `replaces` another running release of the policy, which ends as `hold`. Raises `NotFound` for an
        unknown revision, `ConfigError` for an unknown setting or gate, and `Conflict` for a revision with a
        tombstone, of another base, for the champion itself, or while another release runs that it may not
        replace.
        """
        revision = self._catalog.revisions.get(policy, digest)
        running = self._catalog.releases.all(policy, open_only=True)
        for release in running:
            if release.revision == revision.digest:
                return release
        self._refuse_buried(policy, revision.digest)
        self._refuse_foreign(revision)
        champion = self._catalog.routes.get(policy).champion
        if champion == revision.digest:
            raise Conflict(f"Revision {champion[:12]} is already the champion of {policy!r}.")
        config = self._settings(policy, settings)
        now = time.time()
        release = Release(
            id=str(uuid.uuid4()),
            policy=policy,
            revision=revision.digest,
            baseline=champion,
            step="probe",
            weight=config.weights[0],
            state="running",
            settings=config.model_dump(mode="json"),
            created_at=now,
            updated_at=now,
            skip_gates={gate: {"by": by, "reason": _skip(gate, why)} for gate, why in skip_gates.items()},
        )
        if replaces:
            # What cannot start ends no other release.
            self._catalog.releases.refuse(policy, revision.digest)
            for other in running:
                self.hold(other.id, by, f"Superseded by {by}: a release of {revision.digest[:12]}.")
        self._catalog.releases.add(release)
        return release

    @_one_at_a_time
    def approve(self, release_id: str, by: str, reason: str) -> Release:
        """Approve a release, or its step, that waits for it; the first approval counts.

        Raises `Conflict` when the release has ended or is at another step.
        """
        release = self._catalog.releases.get(release_id)
        approved = {"by": by, "reason": reason, "at": time.time()}
        if release.asked:
            given = [*release.approvals[:-1], release.asked | approved]
            return self._applier.note(release, approvals=given)
        if release.approved:
            return release
        if release.state != "running" or release.step != "approval":
            raise Conflict(
                f"Release {release_id} does not wait for approval: "
                f"its state is {release.state!r}, its step {release.step!r}."
            )
        return self._applier.note(release, approved=approved | {"weight": release.weight})

    @_one_at_a_time
    def pause(self, release_id: str, by: str, reason: str) -> Release:
        """Leave a release where it is until `resume`; only harm and people still end it. The first counts.

        Raises `Conflict` when it has ended or its verdict is there.
        """
        release = self._catalog.releases.get(release_id)
        if release.state != "running" or release.step == "done":
            raise Conflict(f"Release {release_id} cannot be paused: its verdict is there. {release.reason}")
        if release.paused:
            return release
        pause = {"by": by, "reason": reason, "at": time.time()}
        return self._applier.note(release, pauses=[*release.pauses, pause])

    @_one_at_a_time
    def resume(self, release_id: str, by: str, reason: str) -> Release:
        """Have a paused release go on; raises `Conflict` when it is not paused."""
        release = self._catalog.releases.get(release_id)
        if not release.paused:
            raise Conflict(f"Release {release_id} is not paused: its state is {release.state!r}.")
        over = {"resumed_by": by, "resumed_for": reason, "resumed_at": time.time()}
        return self._applier.note(release, pauses=[*release.pauses[:-1], release.paused | over])

    @_one_at_a_time
    def hold(self, release_id: str, by: str, reason: str) -> Release:
        """End a running release without changing the champion; one that has ended stays as it is.

        Raises `Conflict` while releases are frozen and users see the canary; `rollback` works then.
        """
        release = self._catalog.releases.get(release_id)
        if release.state != "running":
            return release
        if self._catalog.routes.get(release.policy).canary == release.revision:
            self._refuse_frozen()
        return self._applier.apply(release, Action("hold", reason), self._evidence(release), by)

    @_one_at_a_time
    def promote(self, policy: str, digest: str, by: str, reason: str) -> Route:
        """Make a revision the champion now; its own running release ends promoted, another one held.

        Raises `Conflict` for a tombstone, a freeze, another base, or without an accepted effect probe.
        """
        revision = self._catalog.revisions.get(policy, digest)
        self._refuse_buried(policy, revision.digest)
        self._refuse_frozen()
        self._refuse_foreign(revision)
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

    @_one_at_a_time
    def restore(self, policy: str, digest: str | None, by: str, reason: str) -> Route:
        """Make an earlier revision the champion again; without a digest, the route's `previous`.

        Raises `NotFound` when there is no earlier champion, and what `promote` raises.
        """
        target = digest or self._catalog.routes.get(policy).previous
        if not target:
            raise NotFound(f"Policy {policy!r} has no previous champion. Name a revision to restore.")
        return self.promote(policy, target, by, reason)

    @_one_at_a_time
    def rollback(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """Roll a revision back: write its tombstone, then the route; champion, canary or neither."""
        revision = self._catalog.revisions.get(policy, digest)
        stone = self._changes.withdraw(policy, revision.digest, reason, by)
        for release in self._catalog.releases.all(policy, open_only=True):
            if release.revision == revision.digest:
                self._applier.apply(release, Action("rollback", stone.reason), self._evidence(release), by)
                return stone
        about = f"rollback/{stone.at}"
        self._changes.say_by_hand("rollback", policy, revision.digest, stone.by, stone.reason, about)
        return stone

    @_one_at_a_time
    def lift(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """Lift a tombstone; the route stays as it is."""
        revision = self._catalog.revisions.get(policy, digest)
        return self._changes.lift(policy, revision.digest, by, reason)

    @_one_at_a_time
    def freeze(self, by: str, reason: str) -> str:
        """Block promotions and canaries until `thaw`; return the message that refused callers get."""
        self._switch(True, by, reason)
        return self.frozen() or ""

    @_one_at_a_time
    def thaw(self, by: str, reason: str) -> str | None:
        """Allow promotions and canaries again; return what `frozen` then says."""
        self._switch(False, by, reason)
        return self.frozen()

    def frozen(self) -> str | None:
        """Return why releases are frozen, or None."""
        if not self._catalog.switches.is_on(FREEZE):
            return None
        said = self._catalog.notices.newest("graftwork.frozen")
        why = f" {said.reason}" if said else ""
        return f"Releases are frozen{why}. Only rollbacks are allowed until `graftwork decide thaw`."

    def _refuse_frozen(self) -> None:
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
                "Lift it first with `graftwork rollback --lift`, your name and a reason."
            )

    def _refuse_foreign(self, revision: Revision) -> None:
        if revision.base != self._catalog.policies.get(revision.policy).base:
            raise Conflict(
                f"Revision {revision.digest[:12]} of {revision.policy!r} was trained on another base, "
                f"{revision.base[:12]}. Train the policy on its base again."
            )

    def _settings(self, policy: str, changes: dict[str, Any]) -> ReleaseConfig:
        try:
            return ReleaseConfig.model_validate(self._configured(policy).model_dump() | changes)
        except ValidationError as error:
            raise ConfigError(
                f"The release's settings are not valid. {explain(error, ReleaseConfig)}"
            ) from None


def _skip(gate: str, reason: str) -> str:
    if gate not in SKIPPABLE:
        raise ConfigError(f"The gate {gate!r} cannot be skipped. Gates that can: {', '.join(SKIPPABLE)}.")
    if not reason.strip():
        raise ConfigError(f"Skipping the {gate} gate needs a reason.")
    return reason
