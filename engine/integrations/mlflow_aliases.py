"""Keeps routes and the aliases `champion`, `canary` and `previous` in MLflow's registry equal, both ways.

The route in the catalog decides what is served. An alias that differs from what the controller last wrote was
moved by a person: `champion` promotes, `canary` starts a release (deleting it holds the release), and
`previous` is reset. A refused move is reset too, with the reason in the version's tag `graftwork.refused`.
MLflow stores no user for an alias, so a move is made in the name "mlflow".

Before each write the catalog notes the intent ("3>5"), so that after a crash both values count as ours.
MLflow has no compare-and-swap: of two moves within one interval only the later one is seen.

A registry that has lost a noted version or its highest version, or whose last change is older than before,
was restored from a backup or lost a version. Its aliases then move nothing. While a version of the route's
revisions is missing there is an alarm; once all exist, the aliases are written from the route.
"""

import logging
import time
from dataclasses import dataclass

import httpx

from engine.catalog.access import acting
from engine.catalog.catalog import AliasNote, Catalog, Route
from engine.controller.release_decisions import ReleaseDecisions
from engine.errors import GraftworkError
from engine.integrations.mlflow_registry import Model, Registry
from engine.notifications.notices import notify
from engine.threads import PeriodicThread

INTERVAL_S = 1.0
ROLES = ("champion", "canary", "previous")
SEEN, LOST = "@seen", "@lost"
BY = "mlflow"
REFUSED = "graftwork.refused"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AliasMove:
    """An alias that a person moved to `version`, or deleted (None)."""

    role: str
    version: str | None


def find_moves(aliases: dict[str, str], notes: dict[str, AliasNote]) -> list[AliasMove]:
    """Return the aliases that match neither the last write nor a noted intent."""
    ours = {role: (note.version or "").split(">") for role, note in notes.items()}
    return [
        AliasMove(role, aliases.get(role))
        for role in ROLES
        if aliases.get(role, "") not in ours.get(role, [""])
    ]


def is_older(model: Model, notes: dict[str, AliasNote]) -> bool:
    """Return whether the registry's highest version or last change of a model is older than noted."""
    seen = notes.get(SEEN)
    if seen is None:
        return False
    return model.highest < int(seen.version or 0) or model.updated < int(seen.digest or 0)


class AliasMirror(PeriodicThread):
    """Keeps aliases and routes equal, on a thread of its own.

    A move holds the lock of `decisions`, calls to MLflow do not. `link` is the URL in notifications of
    refusals.
    """

    def __init__(
        self,
        catalog: Catalog,
        decisions: ReleaseDecisions,
        registry: Registry,
        link: str = "",
    ):
        super().__init__("aliases", INTERVAL_S, self._mirror_in_name)
        self._catalog = catalog
        self._decisions = decisions
        self._registry = registry
        self._link = link
        self._alarms: dict[str, str] = {}

    @property
    def fault(self) -> str | None:
        """Why aliases and routes are not equal now, or None."""
        if self.work.error:
            return f"The aliases in MLflow are not up to date: {self.work.error}"
        return " ".join(list(self._alarms.values())) or None

    def _mirror_in_name(self) -> None:
        with acting(BY):
            self.mirror()

    def mirror(self) -> None:
        """Reconcile every registered policy's aliases with its route; raises `httpx.HTTPError`."""
        notes: dict[str, dict[str, AliasNote]] = {}
        for (policy, alias), note in self._catalog.aliases.all().items():
            notes.setdefault(policy, {})[alias] = note
        models = {model.name: model for model in self._registry.models()}
        # There may be far more policies than models.
        ours = self._catalog.routes.among(models)
        models = {name: model for name, model in models.items() if name in ours}
        for name, model in models.items():
            try:
                self._reconcile(model, notes.get(name, {}))
            except (GraftworkError, httpx.HTTPStatusError) as error:
                # A model that cannot be reconciled must not block the others.
                self._alarms[name] = f"The aliases of {name!r} are not up to date: {error}"
        self._miss(notes, set(models))

    def _reconcile(self, model: Model, notes: dict[str, AliasNote]) -> None:
        moves = find_moves(model.aliases, notes)
        lost = notes.get(LOST)
        if (lost and lost.version) or is_older(model, notes) or (moves and self._lost_version(model, notes)):
            # Noted, so that registering a lost version again does not look like a person's move.
            self._catalog.aliases.note(model.name, LOST, str(model.highest), None)
            if not self._has_all(model.name):
                return
            self._catalog.aliases.note(model.name, LOST, None, None)
        else:
            for move in moves:
                self._carry_out(model, move)
        self._alarms.pop(model.name, None)
        self._write(model, notes)

    def _lost_version(self, model: Model, notes: dict[str, AliasNote]) -> bool:
        """Return whether a noted version is missing, or names another revision now."""
        versions = [note for role, note in notes.items() if role in ROLES and note.version and note.digest]
        return any(
            self._registry.digest(model.name, str(note.version).rpartition(">")[2]) != note.digest
            for note in versions
        )

    def _has_all(self, policy: str) -> bool:
        digests = self._alias_digests(self._catalog.routes.get(policy))
        missing = [
            digest for digest in digests.values() if digest and not self._registry.version(policy, digest)
        ]
        if missing:
            self._alarms[policy] = (
                f"MLflow's registry has lost versions of {policy!r}: it was restored from a backup, or they "
                f"were deleted. Missing: {', '.join(digest[:12] for digest in missing)}. Serving continues "
                "from the catalog. Register the missing revisions again."
            )
        return not missing

    def _carry_out(self, model: Model, move: AliasMove) -> None:
        digest = self._registry.digest(model.name, move.version) if move.version else None
        with self._decisions.lock:
            refusal = self._decide(model.name, move, digest)
        if refusal is not None:
            log.info("%s: alias %s to version %s: %s", model.name, move.role, move.version, refusal)
            tagged = move.version or self._current_version(model.name, move.role)
            if tagged:
                self._registry.tag(model.name, tagged, REFUSED, refusal)
            # Each refusal is an event of its own.
            key = str(time.time())
            notify(self._catalog, "revision.refused", refusal, self._link, key, model.name, digest)
        elif move.version:
            self._registry.untag(model.name, move.version, REFUSED)

    def _decide(self, policy: str, move: AliasMove, digest: str | None) -> str | None:
        """Carry out a move; return why it was refused, or None."""
        route = self._catalog.routes.get(policy)
        if digest is not None and digest == self._alias_digests(route)[move.role]:
            return None
        if move.version is not None and digest is None:
            return "This version is not a revision: it has no tag `graftwork.digest`."
        try:
            return self._take_effect(policy, move, digest)
        except GraftworkError as error:
            return str(error)

    def _take_effect(self, policy: str, move: AliasMove, digest: str | None) -> str | None:
        if move.role == "previous":
            return "Graftwork manages the alias `previous`. Move `champion` instead."
        if move.role == "champion" and digest is None:
            return "The alias `champion` was reset. Move it to another version, or run `graftwork rollback`."
        reason = f"The alias {move.role} was moved in MLflow to version {move.version}."
        if move.role == "champion":
            self._decisions.promote(policy, digest or "", BY, reason)
        elif digest is not None:
            self._decisions.start(policy, digest, {}, {}, BY, replaces=True)
        else:
            for release in self._catalog.releases.all(policy, open_only=True):
                self._decisions.hold(release.id, BY, "The alias canary was deleted in MLflow.")
        return None

    def _alias_digests(self, route: Route) -> dict[str, str | None]:
        """Return the revision that each alias should name; `canary` names it from the release's start."""
        running = self._catalog.releases.all(route.policy, open_only=True)
        canary = running[0].revision if running else route.canary
        return {"champion": route.champion, "canary": canary, "previous": route.previous}

    def _current_version(self, policy: str, role: str) -> str | None:
        digest = self._alias_digests(self._catalog.routes.get(policy))[role]
        return self._registry.version(policy, digest) if digest else None

    def _write(self, model: Model, notes: dict[str, AliasNote]) -> None:
        """Write the aliases of the current route to MLflow, and note them."""
        for role, digest in self._alias_digests(self._catalog.routes.get(model.name)).items():
            note, now = notes.get(role), model.aliases.get(role)
            if note and note.digest == digest and note.version == now:
                continue
            version = self._registry.version(model.name, digest) if digest else None
            if now != version:
                self._catalog.aliases.note(model.name, role, f"{now or ''}>{version or ''}", digest)
                self._registry.set_alias(model.name, role, version)
            self._catalog.aliases.note(model.name, role, version, digest)
        seen = notes.get(SEEN)
        if not seen or (seen.version, seen.digest) != (str(model.highest), str(model.updated)):
            self._catalog.aliases.note(model.name, SEEN, str(model.highest), str(model.updated))

    def _miss(self, notes: dict[str, dict[str, AliasNote]], policies: set[str]) -> None:
        for policy in set(notes) - policies:
            self._alarms[policy] = (
                f"The registered model {policy!r} is missing in MLflow. Serving continues from the catalog. "
                "Register its revisions again."
            )
