"""Routes and aliases kept equal, both ways: `champion`, `canary`, `previous` in MLflow's registry.

The serving truth is the catalog's route. An alias that differs from what the controller last wrote
is a person's move: `champion` promotes, `canary` starts a release (taking it away holds it), and
`previous` is put back. A move that is refused is put back too, with the sentence in the version's tag
`graftwork.refused`. MLflow keeps no user for an alias, so a move is made in the name "mlflow".

Before a write its intent is noted ("3>5"), so that after a kill both values count as ours. MLflow has no
compare-and-swap: of two people who move an alias within one look, the later one is seen.

A registry that has lost what was seen in it (a noted version, the highest version, or its own time ran
backwards) was restored from a backup or lost a version: it moves nothing. While it lacks a version of
the route's revisions that is an alarm; once it has them all, its aliases are written from the route.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx

from engine.catalog.catalog import AliasNote, Catalog, Route
from engine.controller.mlflow_registry import Model, Registry
from engine.controller.notifications import refused
from engine.controller.release_decisions import ReleaseDecisions
from engine.errors import GraftworkError
from engine.threads import PeriodicThread

INTERVAL_S = 1.0
HOOK, HOOK_EVERY_S = "graftwork", 60.0
ROLES = ("champion", "canary", "previous")
SEEN, LOST = "@seen", "@lost"
BY = "mlflow"
REFUSED = "graftwork.refused"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AliasMove:
    """A person's move: the alias now names `version` (None: it was deleted)."""

    role: str
    version: str | None


def find_moves(aliases: dict[str, str], notes: dict[str, AliasNote]) -> list[AliasMove]:
    """Return the aliases that are neither what was last written nor what was about to be written."""
    moves = []
    for role in ROLES:
        note, now = notes.get(role), aliases.get(role)
        ours = (note.version or "").split(">") if note else [""]
        if (now or "") not in ours:
            moves.append(AliasMove(role, now))
    return moves


def is_older(model: Model, notes: dict[str, AliasNote]) -> bool:
    """Say whether the registry shows less of a model than was seen before."""
    seen = notes.get(SEEN)
    if seen is None:
        return False
    return model.highest < int(seen.version or 0) or model.updated < int(seen.digest or 0)


class AliasMirror(PeriodicThread):
    """Keeps aliases and routes equal, from a thread of its own.

    `lock` is the controller's: decisions are made under it, calls of MLflow are not. `link` is where
    people read more about a refusal, `hook` where MLflow's webhook tells of a moved alias.
    """

    def __init__(
        self,
        catalog: Catalog,
        decisions: ReleaseDecisions,
        lock: Any,
        registry: Registry,
        link: str = "",
        hook: str = "",
    ):
        super().__init__("aliases", INTERVAL_S, self._mirror_hooked)
        self._catalog = catalog
        self._decisions = decisions
        self._lock = lock
        self._registry = registry
        self._link = link
        self._hook = hook
        self._hook_due = 0.0
        self._alarms: dict[str, str] = {}

    @property
    def fault(self) -> str | None:
        """What keeps aliases and routes from being equal."""
        if self.error:
            return f"The aliases in MLflow are not up to date: {self.error}"
        return " ".join(list(self._alarms.values())) or None

    def _mirror_hooked(self) -> None:
        self.mirror()
        self._keep_hooked()

    def mirror(self) -> None:
        """Bring every registered policy's aliases and route together; raises `httpx.HTTPError`."""
        notes: dict[str, dict[str, AliasNote]] = {}
        for (policy, alias), note in self._catalog.aliases.all().items():
            notes.setdefault(policy, {})[alias] = note
        models = {model.name: model for model in self._registry.models()}
        # Policies may be many more than models.
        ours = self._catalog.routes.among(models)
        models = {name: model for name, model in models.items() if name in ours}
        for name, model in models.items():
            try:
                self._reconcile(model, notes.get(name, {}))
            except (GraftworkError, httpx.HTTPStatusError) as error:
                # One model that cannot be brought together must not keep the others apart.
                self._alarms[name] = f"The aliases of {name!r} are not up to date: {error}"
        self._miss(notes, set(models))

    def _keep_hooked(self) -> None:
        """See to the webhook now and then: a registry from a backup has lost it."""
        if not self._hook or time.monotonic() < self._hook_due:
            return
        self._hook_due = time.monotonic() + HOOK_EVERY_S
        try:
            self._registry.ensure_webhook(HOOK, self._hook)
        except httpx.HTTPStatusError as error:
            # A server that takes https only, say: the poll alone is quick enough.
            log.info("MLflow took no webhook: %s", error)

    def _reconcile(self, model: Model, notes: dict[str, AliasNote]) -> None:
        moves = find_moves(model.aliases, notes)
        lost = notes.get(LOST)
        if (lost and lost.version) or is_older(model, notes) or (moves and self._lost_version(model, notes)):
            # Noted, so that registering again what was lost does not look like a person's move.
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
        """Say whether a version that was noted is gone, or is another revision now."""
        known = [note for role, note in notes.items() if role in ROLES and note.version and note.digest]
        return any(
            self._registry.digest(model.name, str(note.version).rpartition(">")[2]) != note.digest
            for note in known
        )

    def _has_all(self, policy: str) -> bool:
        wanted = self._wanted(self._catalog.routes.get(policy))
        missing = [
            digest for digest in wanted.values() if digest and not self._registry.version(policy, digest)
        ]
        if missing:
            self._alarms[policy] = (
                f"MLflow's registry shows less of {policy!r} than before: it was restored or lost a version, "
                f"and lacks {', '.join(digest[:12] for digest in missing)}. Serving goes on as the catalog "
                "says; register the missing revisions again."
            )
        return not missing

    def _carry_out(self, model: Model, move: AliasMove) -> None:
        digest = self._registry.digest(model.name, move.version) if move.version else None
        with self._lock:
            refusal = self._decide(model.name, move, digest)
        if refusal is not None:
            log.info("%s: alias %s to version %s: %s", model.name, move.role, move.version, refusal)
            tagged = move.version or self._current_version(model.name, move.role)
            if tagged:
                self._registry.tag(model.name, tagged, REFUSED, refusal)
            refused(self._catalog, model.name, digest, refusal, self._link)
        elif move.version:
            self._registry.untag(model.name, move.version, REFUSED)

    def _decide(self, policy: str, move: AliasMove, digest: str | None) -> str | None:
        """Let a move take effect; return why not, or None."""
        route = self._catalog.routes.get(policy)
        if digest is not None and digest == self._wanted(route)[move.role]:
            return None
        if move.version is not None and digest is None:
            return "This version names no revision: it has no tag `graftwork.digest`."
        try:
            return self._take_effect(policy, move, digest)
        except GraftworkError as error:
            return str(error)

    def _take_effect(self, policy: str, move: AliasMove, digest: str | None) -> str | None:
        if move.role == "previous":
            return "The alias `previous` is kept by Graftwork; move `champion` instead."
        if move.role == "champion" and digest is None:
            return "The alias `champion` was put back: move it to another version, or `graftwork rollback`."
        reason = f"The alias {move.role} was moved in MLflow to version {move.version}."
        if move.role == "champion":
            self._decisions.promote(policy, digest or "", BY, reason)
        elif digest is not None:
            self._decisions.start(policy, digest, {}, {}, BY)
        else:
            for release in self._catalog.releases.all(policy, open_only=True):
                self._decisions.hold(release.id, BY, "The alias canary was deleted in MLflow.")
        return None

    def _wanted(self, route: Route) -> dict[str, str | None]:
        """Return which revision each alias should name: the canary from its release's beginning on."""
        running = self._catalog.releases.all(route.policy, open_only=True)
        canary = running[0].revision if running else route.canary
        return {"champion": route.champion, "canary": canary, "previous": route.previous}

    def _current_version(self, policy: str, role: str) -> str | None:
        digest = self._wanted(self._catalog.routes.get(policy))[role]
        return self._registry.version(policy, digest) if digest else None

    def _write(self, model: Model, notes: dict[str, AliasNote]) -> None:
        """Make the aliases those of the route as it now is, and note them."""
        for role, digest in self._wanted(self._catalog.routes.get(model.name)).items():
            note, now = notes.get(role), model.aliases.get(role)
            if note and note.digest == digest and note.version == now:
                continue
            wanted = self._registry.version(model.name, digest) if digest else None
            if now != wanted:
                self._catalog.aliases.note(model.name, role, f"{now or ''}>{wanted or ''}", digest)
                self._registry.set_alias(model.name, role, wanted)
            self._catalog.aliases.note(model.name, role, wanted, digest)
        seen = notes.get(SEEN)
        if not seen or (seen.version, seen.digest) != (str(model.highest), str(model.updated)):
            self._catalog.aliases.note(model.name, SEEN, str(model.highest), str(model.updated))

    def _miss(self, notes: dict[str, dict[str, AliasNote]], found: set[str]) -> None:
        for policy in set(notes) - found:
            self._alarms[policy] = (
                f"The registered model {policy!r} is gone from MLflow. Serving goes on as the catalog says; "
                "register its revisions again."
            )
