"""Applies a release's next action: changes routes, updates release rows, emits verdicts.

Crash-safe: every write is idempotent or a compare-and-swap, so repeating an interrupted action reaches the
same end.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from engine.catalog.catalog import Catalog, Release
from engine.catalog.records import ENDS, VERDICTS
from engine.controller.advance import Action, Evidence
from engine.controller.route_changes import CODE_VERSION, EVENTS, RouteChanges
from engine.ledger.ledger import Ledger, Spool
from engine.settings.params import content_hash
from engine.settings.releases import ReleaseConfig

# Called with each release that has changed, perhaps twice: after a crash it is said again.
OnChange = Callable[[Catalog, Release], object]
NEXT_STEP = {"probe": "score", "score": "shadow", "shadow": "approval", "approval": "canary"}


class Applier:
    """Writes decisions to the catalog and the spool; `on_change` is told of each release that it changes."""

    def __init__(self, catalog: Catalog, spool: Spool, on_change: Sequence[OnChange] = ()):
        self.changes = RouteChanges(catalog, spool)
        self._catalog = catalog
        self._spool = spool
        self._on_change = on_change

    def apply(self, release: Release, action: Action, evidence: Evidence, by: str = "controller") -> Release:
        """Carry out an action other than `wait` in the name of `by`; return the updated release."""
        if action.kind == "next_gate":
            return self._tell(self._update(release, step=_following(release), reason=action.reason))
        if action.kind == "ask":
            asked = {"weight": action.weight, "asked_at": evidence.now}
            return self.note(release, approvals=[*release.approvals, asked])
        if action.kind == "start_canary":
            return self._start_canary(release, action, evidence)
        if action.kind == "next_step":
            return self._next_step(release, action, evidence)
        return self._end(release, action, evidence, by)

    def note(self, release: Release, **changes: Any) -> Release:
        """Change what does not advance a release, such as a pause; return the updated release."""
        return self._tell(self._update(release, updated_at=release.updated_at, **changes))

    def say_verdict(self, release: Release) -> None:
        """Tell of a release's verdict, and emit its ledger row, whose id derives from the release."""
        # The row comes last: `say_missing` skips verdicts that the ledger has.
        self._tell(release)
        self._spool.emit(
            "verdicts",
            id=verdict_id(release),
            at=release.updated_at,
            release=release.id,
            policy=release.policy,
            digest=release.revision,
            baseline=release.baseline,
            verdict=VERDICTS[release.state],
            reason=release.reason,
            by=release.approval or "controller",
            evidence=release.evidence | {"skip_gates": release.skip_gates},
            code_version=CODE_VERSION,
            config_hash=content_hash(release.settings),
        )

    def say_missing(self, ledger: Ledger) -> None:
        """Say the verdicts, route changes and steps that a crash lost. Call it once the spool is ingested."""
        verdict_ids = {row[0] for row in ledger.connection.execute("SELECT id FROM verdicts").fetchall()}
        for release in self._catalog.releases.all():
            if release.state == "running":
                self._tell(release)
            elif verdict_id(release) not in verdict_ids:
                self.say_verdict(release)
        self.changes.say_missing(ledger)

    def _start_canary(self, release: Release, action: Action, evidence: Evidence) -> Release:
        # The route's own time and version: after a crash right here, units since then still count.
        routed = self.changes.start_canary(evidence.route, release, release.weight, action.reason)
        started = self._update(
            release,
            canary_started_at=release.canary_started_at or routed.updated_at,
            canary_version=release.canary_version or routed.version,
            ramp=release.ramp or [[routed.version, release.weight]],
            reason=action.reason,
        )
        return self._tell(started)

    def _next_step(self, release: Release, action: Action, evidence: Evidence) -> Release:
        """Write the step into the row first: `advance` sees a route that lags behind it, and repeats it.

        Before the canary's start there is no step to write yet, only its weight.
        """
        if release.canary_started_at is None:
            return self._update(release, weight=action.weight, reason=action.reason)
        so_far = release.ramp or [[release.canary_version or 0, release.weight]]
        ramp = [*so_far, [evidence.route.version + 1, action.weight]]
        release = self._update(release, weight=action.weight, ramp=ramp, reason=action.reason)
        self.changes.start_canary(evidence.route, release, action.weight, action.reason)
        return self._tell(release)

    def _end(self, release: Release, action: Action, evidence: Evidence, by: str) -> Release:
        if action.kind == "rollback":
            stone = self.changes.withdraw(release.policy, release.revision, action.reason, by)
            release = self._decide(release, action, evidence, stone.by)
        elif release.step != "done":
            release = self._decide(release, action, evidence, by)
        by = release.approval or by
        if action.kind == "promote":
            self.changes.promote(release.policy, release.revision, action.reason, by, release)
        if action.kind == "hold":
            self.changes.end_canary(release.policy, release.revision, action.reason, by)
        ended = self._update(release, state=ENDS[action.kind])
        self.say_verdict(ended)
        return ended

    def _decide(self, release: Release, action: Action, evidence: Evidence, by: str) -> Release:
        """Write the verdict into the row first, so that a crash from here on cannot change it."""
        return self._update(
            release,
            step="done",
            reason=action.reason,
            evidence=evidence.summary() | {"verdict": action.kind, "decided_at": evidence.now},
            approval=None if by == "controller" else by,
        )

    def _tell(self, release: Release) -> Release:
        for tell in self._on_change:
            tell(self._catalog, release)
        return release

    def _update(self, release: Release, **changes: Any) -> Release:
        return self._catalog.releases.update(release.id, release.version, **changes)


def _following(release: Release) -> str:
    """Return the gate after a release's present one; without evaluators that decide there is no shadow."""
    following = NEXT_STEP[release.step]
    if following == "shadow" and not ReleaseConfig.stored(release.settings).shadow_evaluators:
        return NEXT_STEP[following]
    return following


def verdict_id(release: Release) -> str:
    """Return the id of a release's verdict row: a UUIDv5 of release and verdict."""
    return str(uuid.uuid5(EVENTS, f"{release.id}/{VERDICTS[release.state]}"))
