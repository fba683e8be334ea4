"""Keeps the host tier in step with the catalog: it loads revisions under release, and evicts what is gone.

Loads have background priority: requests of users go first.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from engine.catalog.records import served_name
from engine.catalog.replicas import Loads
from engine.errors import Busy, GraftworkError, NotFound
from engine.serving.gateway.routing import Router
from engine.serving.residency.residency import Residency
from engine.threads import Work

LOOK_S = 0.25
# Loads that failed, for instance while the store was down, are retried after 15 s, then 30 s, 60 s and so on.
RETRY_S, LONGEST_RETRY_S = 15.0, 300.0
# Most loads of its own in the queue at once: one that waits past its timeout is cancelled, and other
# background work, such as scoring, queues behind them.
AHEAD = 32
log = logging.getLogger("graftwork.host_tier")


class HostTierUpkeep:
    """The loop of one engine; `run` continues until it is cancelled."""

    def __init__(
        self,
        residency: Residency,
        router: Router,
        tell: Callable[[Loads], object] = lambda loads: None,
    ):
        """`tell` is called after each look with what is loaded of the revisions under release."""
        self._residency, self._router, self._tell = residency, router, tell
        self._pending: list[tuple[str, str]] = []
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._known: frozenset[tuple[str, str]] = frozenset()
        # Served names whose load may still wait or run.
        self._asked: set[str] = set()
        # When failed loads are retried, and how long after that again.
        self._retry_at, self._retry_s = time.monotonic() + RETRY_S, RETRY_S
        # Policies that may have residents without a catalog row; None: any policy.
        self._to_check: set[str] | None = set()

    async def run(self) -> None:
        """Look, and tell what is loaded, every `LOOK_S`."""
        work = Work("host-tier")
        try:
            while True:
                with work.turning():
                    await self.look()
                    self._tell(self.loads())
                await asyncio.sleep(LOOK_S)
        finally:
            work.end()

    async def look(self) -> None:
        """Load revisions that are newly under release, then pending ones, as far as the queue has room."""
        router = self._router
        changed = await router.ask(router.take_changed)
        self._to_check = None if changed is None or self._to_check is None else self._to_check | changed
        if self._to_check is None or self._to_check:
            await self._evict_what_is_gone(self._to_check)
        released = await router.ask(router.under_release)
        self._retry(released)
        fresh = released - self._seen
        self._pending = [*fresh, *(one for one in self._pending if one not in fresh)]
        self._seen = released
        self._asked = {name for name in self._asked if self._residency.is_loading(name)}
        while self._pending and len(self._asked) < AHEAD:
            policy, digest = self._pending[0]
            try:
                self._residency.load_ahead(await router.ask(router.revision, policy, digest))
                self._asked.add(served_name(policy, digest))
            except Busy:
                return
            except GraftworkError as error:
                # It may be gone or belong to another base; a request for it gets the error.
                log.info("%s is not loaded ahead: %s", served_name(policy, digest), error)
            self._pending.pop(0)

    def _retry(self, released: frozenset[tuple[str, str]]) -> None:
        """Have every revision under release loaded again once it is time; those that are here stay."""
        now = time.monotonic()
        if not released <= self._known:
            self._retry_at, self._retry_s = now + RETRY_S, RETRY_S
        elif now >= self._retry_at:
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            self._seen, self._retry_at = frozenset(), now + self._retry_s
        self._known = released

    def loads(self) -> dict[tuple[str, str], str | None]:
        """Return which revisions under release are loaded (None) or why not, without those on their way."""
        residents, faults = self._residency.residents, self._residency.faults
        names = {pair: served_name(*pair) for pair in self._seen}
        loaded = {pair: None for pair, name in names.items() if name in residents}
        return loaded | {
            pair: faults[name] for pair, name in names.items() if name in faults and pair not in loaded
        }

    def missing(self) -> list[str]:
        """Return the served names under release that are not loaded."""
        names = served_names(self._router.under_release())
        return sorted(name for name in names if name not in self._residency.residents)

    async def _evict_what_is_gone(self, policies: set[str] | None) -> None:
        """Evict residents whose rows were purged or have expired, and those in quarantine.

        Quarantined ones must go because a slot may be filled from damaged bytes. Rows that cannot be read
        now, and adapters still in use, are checked again at the next look.
        """
        self._residency.doubt(policies)
        rows = {
            name: resident.revision
            for name, resident in self._residency.residents.items()
            if policies is None or resident.revision.policy in policies
        }
        router = self._router
        damaged = await router.ask(router.in_quarantine, rows.values())
        in_use = set()
        for name, row in rows.items():
            if name not in self._residency.residents:
                continue
            if (row.policy, row.digest) in damaged:
                self._residency.lose(name)
                continue
            try:
                await router.ask(partial(router.revision, row.policy, row.digest, may_be_old=False))
            except NotFound:
                if not self._residency.evict(name):
                    in_use.add(row.policy)
        self._to_check = in_use


def served_names(revisions: frozenset[tuple[str, str]]) -> frozenset[str]:
    """Return the served names of revisions (policy, digest)."""
    return frozenset(served_name(policy, digest) for policy, digest in revisions)
