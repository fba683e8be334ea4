"""The only writer of routes and tombstones.

Runs in the controller's process where a controller serves the catalog, elsewhere under the controller's lease
(`alone`). Crash-safe: every write is idempotent. A new policy's row brings an empty route.
"""

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from engine.catalog.catalog import Catalog, Release, Route, Tombstone
from engine.errors import Conflict
from engine.ledger.sender import open_spool
from engine.ledger.spool import Spool
from engine.quality.probe import ProbeResult
from engine.settings.params import Params, content_hash
from engine.threads import PeriodicThread
from engine.version import code_version

if TYPE_CHECKING:
    from engine.ledger.ledger import Ledger

LEASE, LEASE_S = "controller", 5.0
# Prefix of lease holders that are not controllers, and how often one polls for another's lease.
ALONE = "alone:"
POLL_S = 0.1
# Author of the tombstones that the effect probe writes.
GATE = "effect probe"
# Columns of a route that the ledger does not have.
UNSAID = ("salt", "plain_units")
EVENTS = uuid.UUID("6f1d2a52-7c55-5d0e-9a55-3e5c1e0c8a11")
CODE_VERSION = code_version()


class RouteChanges:
    """Writes routes and tombstones to the catalog, and their ledger rows to the spool."""

    def __init__(self, catalog: Catalog, spool: Spool):
        self._catalog = catalog
        self._spool = spool

    def withdraw(self, policy: str, digest: str, reason: str, by: str) -> Tombstone:
        """Write a revision's tombstone, then remove it from the route; `previous` replaces a champion."""
        stone = self._catalog.tombstones.add(policy, digest, reason, by)
        route = self._catalog.routes.get(policy)
        new_route = route
        if route.canary == digest:
            new_route = replace(new_route, canary=None, weight=0.0)
        if route.champion == digest:
            usable = route.previous and not self._catalog.tombstones.find(policy, route.previous)
            new_route = replace(new_route, champion=route.previous if usable else None, previous=None)
        self._set_route(new_route, stone.by, stone.reason)
        return stone

    def lift(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """Lift a tombstone; the route stays as it is. Raises `NotFound` when there is none."""
        return self._catalog.tombstones.lift(policy, digest, by, reason)

    def promote(
        self, policy: str, digest: str, reason: str, by: str, release: Release | None = None
    ) -> Route:
        """Make a revision the champion and end the canary; `Conflict` when its `release` has changed."""
        route = self._catalog.routes.get(policy)
        previous = route.previous if route.champion == digest else route.champion
        new_route = replace(route, champion=digest, previous=previous, canary=None, weight=0.0)
        return self._set_route(new_route, by, reason, release)

    def start_canary(self, route: Route, release: Release, weight: float, reason: str) -> Route:
        """Give a release's canary `weight` of the units.

        `Conflict` when route or release have changed since they were read.
        """
        new_route = replace(route, canary=release.revision, weight=weight)
        return self._set_route(new_route, "controller", reason, release)

    def end_canary(self, policy: str, digest: str, reason: str, by: str) -> None:
        """End a revision's canary; another revision's stays."""
        route = self._catalog.routes.get(policy)
        ours = route.canary == digest
        self._set_route(replace(route, canary=None, weight=0.0) if ours else route, by, reason)

    def record_probe(self, policy: str, digest: str, result: ProbeResult) -> None:
        """Store the result of a revision's effect probe; a refused revision gets a tombstone.

        A revision that equals the base is harmless and gets none. An accepted one loses the tombstone that
        the probe wrote, never a person's.
        """
        probe = result.to_json()
        self._catalog.revisions.set_probe(policy, digest, probe)
        stone, route = self._catalog.tombstones.find(policy, digest), self._catalog.routes.get(policy)
        if result.accepted:
            if stone and stone.by == GATE:
                self.lift(policy, digest, GATE, result.reason)
            return
        withdrawn = not result.is_base and digest in (route.champion, route.canary)
        if not result.is_base:
            self.withdraw(policy, digest, result.reason, GATE)
        verdict = "rollback" if withdrawn else "hold"
        # The id leaves the verdict out: on a repeated call the route no longer shows the revision.
        about = f"{GATE}/{content_hash(probe)}"
        self.say_by_hand(verdict, policy, digest, GATE, result.reason, about, probe=probe)

    def purge(self, policy: str, place: Literal["name", "catalog"], by: str) -> dict[str, int]:
        """Remove a policy's route and mark its name, or remove all its rows; return removed rows by table."""
        remove = self._catalog.purges.mark if place == "name" else self._catalog.purges.run
        return remove(policy, by, time.time())

    def say_by_hand(
        self, verdict: str, policy: str, digest: str, by: str, reason: str, about: str, **evidence: Any
    ) -> None:
        """Emit a verdict outside any release; `about` makes its id unique."""
        self._spool.emit(
            "verdicts",
            id=str(uuid.uuid5(EVENTS, f"{policy}/{digest}/{about}")),
            policy=policy,
            digest=digest,
            verdict=verdict,
            reason=reason,
            by=by,
            evidence=evidence or None,
            code_version=CODE_VERSION,
        )

    def say_missing(self, ledger: "Ledger") -> None:
        """Emit the route changes that a crash lost."""
        row_ids = {row[0] for row in ledger.connection.execute("SELECT id FROM route_changes").fetchall()}
        after = ""
        while routes := self._catalog.routes.page(after, changed=True):
            for route in routes:
                if _route_change_id(route) not in row_ids:
                    self._say_route(route, "controller", "Found after a restart.")
            after = routes[-1].policy

    def _set_route(self, route: Route, by: str, reason: str, release: Release | None = None) -> Route:
        """Update a route if it differs and emit the change. Idempotent."""
        current = self._catalog.routes.get(route.policy)
        if _meaning(current) != _meaning(route):
            current = self._catalog.routes.update(route, route.version, release)
        self._say_route(current, by, reason)
        return current

    def _say_route(self, route: Route, by: str, reason: str) -> None:
        if route.version:
            row = {name: value for name, value in vars(route).items() if name not in UNSAID}
            row |= {"id": _route_change_id(route), "at": row.pop("updated_at"), "by": by, "reason": reason}
            self._spool.emit("route_changes", **row, code_version=CODE_VERSION)


def controller_serves(catalog: Catalog) -> bool:
    """Return whether a controller holds this catalog's lease; then only it may change routes."""
    lease = catalog.leases.find(LEASE)
    return lease is not None and lease.until > time.time() and not lease.holder.startswith(ALONE)


def take_lease(catalog: Catalog, holder: str, lease_s: float = LEASE_S) -> int:
    """Take the lease for changing routes and return its fence; `Conflict` while another process holds it."""
    fence = catalog.leases.acquire(LEASE, holder, lease_s)
    if fence is None:
        lease = catalog.leases.find(LEASE)
        raise Conflict(
            f"Another controller ({lease.holder if lease else 'unknown'}) holds the lease of this catalog. "
            f"Stop it. If it has crashed, its lease expires within {lease_s:g} s."
        )
    return fence


def outlast_lease(catalog: Catalog, holder: str, lease_s: float = LEASE_S) -> None:
    """Wait until the lease of a controller elsewhere that has crashed has expired, at most `lease_s` seconds.

    One that lives renews it, so that `take_lease` then fails.
    """
    until = time.monotonic() + lease_s
    while time.monotonic() < until:
        lease = catalog.leases.find(LEASE)
        if lease is None or lease.holder == holder or lease.until <= time.time():
            return
        time.sleep(POLL_S)


@contextmanager
def alone(params: Params, catalog: Catalog, lease_s: float = LEASE_S) -> Iterator[RouteChanges]:
    """Give the route writer where no controller runs; the block holds the controller's lease.

    Waits up to `lease_s` for another such process. Raises as `take_lease`.
    """
    holder = f"{ALONE}{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"
    fence = _lease_in_turn(catalog, holder, lease_s)
    keeper = PeriodicThread("lease", lease_s / 3, lambda: catalog.leases.renew(LEASE, holder, fence, lease_s))
    keeper.start()
    try:
        with closing(open_spool(params, "route-changes")) as spool:
            yield RouteChanges(catalog, spool)
    finally:
        keeper.stop()
        keeper.join()
        catalog.leases.release(LEASE, holder)


def _lease_in_turn(catalog: Catalog, holder: str, lease_s: float) -> int:
    until = time.monotonic() + lease_s
    while True:
        try:
            return take_lease(catalog, holder, lease_s)
        except Conflict:
            if time.monotonic() > until or controller_serves(catalog):
                raise
            time.sleep(POLL_S)


def _route_change_id(route: Route) -> str:
    return str(uuid.uuid5(EVENTS, f"route/{route.policy}/{route.version}"))


def _meaning(route: Route) -> tuple[str | None, str | None, str | None, float]:
    return route.champion, route.previous, route.canary, route.weight
