"""Carrying out what was decided: tombstones, routes, release rows, verdicts.

Knows the order of effects and that each of them may be the last before a kill: every step is
idempotent or a compare-and-swap, so that doing it all again reaches the same end. Does not decide.
"""

import uuid
from dataclasses import replace
from typing import Any

from engine.catalog.catalog import Catalog, Release, Route, Tombstone
from engine.catalog.records import ENDS, VERDICTS
from engine.controller.advance import Action, Evidence
from engine.controller.notifications import released
from engine.ledger.ledger import Ledger, Spool
from engine.settings.params import content_hash
from engine.version import code_version

EVENTS = uuid.UUID("6f1d2a52-7c55-5d0e-9a55-3e5c1e0c8a11")
CODE_VERSION = code_version()
NEXT_STEP = {"probe": "score", "score": "approval", "approval": "canary"}


class Applier:
    """Writes what was decided to the catalog and to the spool, in the name of `by`."""

    def __init__(self, catalog: Catalog, spool: Spool, site: str = ""):
        self._catalog = catalog
        self._spool = spool
        self._site = site

    def apply(self, release: Release, action: Action, evidence: Evidence, by: str = "controller") -> Release:
        """Carry out an action; return the release as it then is."""
        if action.kind == "wait":
            return release
        if action.kind == "next_gate":
            return self._update(release, step=NEXT_STEP[release.step], reason=action.reason)
        if action.kind == "start_canary":
            return self._start_canary(release, action, evidence)
        return self._end(release, action, evidence, by)

    def withdraw(self, policy: str, digest: str, reason: str, by: str) -> Tombstone:
        """Bury a revision, then take it out of its policy's route: a champion gives way to the previous."""
        stone = self._catalog.tombstones.add(policy, digest, reason, by)
        route = self._catalog.routes.get(policy)
        wanted = route
        if route.canary == digest:
            wanted = replace(wanted, canary=None, weight=0.0)
        if route.champion == digest:
            usable = route.previous and not self._catalog.tombstones.find(policy, route.previous)
            wanted = replace(wanted, champion=route.previous if usable else None, previous=None)
        self.set_route(wanted, stone.by, stone.reason)
        return stone

    def promote(self, policy: str, digest: str, reason: str, by: str) -> Route:
        """Make a revision the champion and end the canary."""
        route = self._catalog.routes.get(policy)
        previous = route.previous if route.champion == digest else route.champion
        wanted = replace(route, champion=digest, previous=previous, canary=None, weight=0.0)
        return self.set_route(wanted, by, reason)

    def set_route(self, route: Route, by: str, reason: str) -> Route:
        """Change a route if it differs, and tell the ledger; again is harmless."""
        current = self._catalog.routes.get(route.policy)
        if _meaning(current) != _meaning(route):
            current = self._catalog.routes.update(route, route.version)
        self._say_route(current, by, reason)
        return current

    def say_verdict(self, release: Release) -> None:
        """Tell people and the ledger how a release ended. Both ids follow from the release."""
        # The notification first: a verdict that the ledger has is never said again.
        released(self._catalog, release, f"{self._site}/releases/{release.id}")
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

    def say_by_hand(
        self, verdict: str, policy: str, digest: str, by: str, reason: str, key: str, **evidence: Any
    ) -> None:
        """Tell the ledger what was decided outside any release; `key` tells one such act from the next."""
        self._spool.emit(
            "verdicts",
            id=str(uuid.uuid5(EVENTS, f"{policy}/{digest}/{verdict}/{key}")),
            policy=policy,
            digest=digest,
            verdict=verdict,
            reason=reason,
            by=by,
            evidence=evidence or None,
            code_version=CODE_VERSION,
        )

    def say_missing(self, ledger: Ledger) -> None:
        """Tell the ledger what a kill kept it from hearing. Ask after everything spooled is ingested."""
        said = {row[0] for row in ledger.connection.execute("SELECT id FROM verdicts").fetchall()}
        for release in self._catalog.releases.all():
            if release.state != "running" and verdict_id(release) not in said:
                self.say_verdict(release)
        said = {row[0] for row in ledger.connection.execute("SELECT id FROM route_changes").fetchall()}
        after = ""
        while routes := self._catalog.routes.page(after, changed=True):
            for route in routes:
                if _route_change_id(route) not in said:
                    self._say_route(route, "controller", "Found after a restart.")
            after = routes[-1].policy

    def _start_canary(self, release: Release, action: Action, evidence: Evidence) -> Release:
        route = replace(evidence.route, canary=release.revision, weight=release.weight)
        # The route's own time: after a kill right here the units since then still count.
        routed = self.set_route(route, "controller", action.reason)
        started = release.canary_started_at or routed.updated_at
        return self._update(release, canary_started_at=started, reason=action.reason)

    def _end(self, release: Release, action: Action, evidence: Evidence, by: str) -> Release:
        if action.kind == "rollback":
            stone = self.withdraw(release.policy, release.revision, action.reason, by)
            release = self._decide(release, action, evidence, stone.by)
        elif release.step != "done":
            release = self._decide(release, action, evidence, by)
        by = release.approval or by
        if action.kind == "promote":
            self.promote(release.policy, release.revision, action.reason, by)
        if action.kind == "hold":
            self._drop_canary(release, action.reason, by)
        ended = self._update(release, state=ENDS[action.kind])
        self.say_verdict(ended)
        return ended

    def _decide(self, release: Release, action: Action, evidence: Evidence, by: str) -> Release:
        """Note the verdict in the row, so that a kill from here on cannot change it."""
        return self._update(
            release,
            step="done",
            reason=action.reason,
            evidence=evidence.summary() | {"verdict": action.kind, "decided_at": evidence.now},
            approval=None if by == "controller" else by,
        )

    def _drop_canary(self, release: Release, reason: str, by: str) -> None:
        route = self._catalog.routes.get(release.policy)
        ours = route.canary == release.revision
        self.set_route(replace(route, canary=None, weight=0.0) if ours else route, by, reason)

    def _update(self, release: Release, **changes: Any) -> Release:
        return self._catalog.releases.update(release.id, release.version, **changes)

    def _say_route(self, route: Route, by: str, reason: str) -> None:
        if route.version:
            self._spool.emit(
                "route_changes",
                id=_route_change_id(route),
                at=route.updated_at,
                policy=route.policy,
                champion=route.champion,
                previous=route.previous,
                canary=route.canary,
                weight=route.weight,
                version=route.version,
                by=by,
                reason=reason,
                code_version=CODE_VERSION,
            )


def verdict_id(release: Release) -> str:
    return str(uuid.uuid5(EVENTS, f"{release.id}/{VERDICTS[release.state]}"))


def _route_change_id(route: Route) -> str:
    return str(uuid.uuid5(EVENTS, f"route/{route.policy}/{route.version}"))


def _meaning(route: Route) -> tuple[str | None, str | None, str | None, float]:
    return route.champion, route.previous, route.canary, route.weight
