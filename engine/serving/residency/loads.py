"""Cold loads: a bounded queue that gives each its turn, and the fetch that performs it.

The queue has two priorities without starvation, and tells how long a load takes. The fetch gets a revision's
bytes from the store and has the engine prepare them. Damaged or missing bytes are looked for once more, in
case they have moved or a cached copy was bad. Bytes that are still damaged put the revision into quarantine.
"""

import asyncio
import contextvars
import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from engine.catalog.catalog import Catalog, Revision
from engine.catalog.records import served_name
from engine.catalog.revision_rows import location
from engine.catalog.waits import ANSWER_S, limit_waits
from engine.errors import AdapterError, Busy, DamagedBytes, MissingBytes
from engine.store.segments import PAGE_ALIGNED_FROM, Store

INTERACTIVE, BACKGROUND = "interactive", "background"
PRIORITIES = (INTERACTIVE, BACKGROUND)
# Cold loads that may wait or run at once; a client that finds no place gets 429.
LOAD_PLACES = 1024
# A waiting background load starts after this many interactive ones.
SHARE = 4
# The share of the queue's places that background loads may take; the rest is reserved for users.
BACKGROUND_PLACES = 0.5
# The share of concurrent loads that may be background: a new interactive load waits for all of them.
BACKGROUND_RUNNING = 1 / 3
# Default concurrency of loads of small and of large adapters. A small load is mostly Python, which delays
# the engine's steps; a large one is mostly checksums, which release the GIL.
AT_ONCE, LARGE_AT_ONCE = 6, 16
# Tolerance for the sum of shares: six times 1/6 is not exactly 1.
ROUNDING = 1e-9
# A load's duration is estimated by the median of this many: a burst of thousands of clients slows the few
# running loads a hundredfold, and a mean would send clients away for a minute.
RECENT = 64
# The estimate before any load has ended, in seconds.
FIRST_S = 0.02
# Upper bound of `Retry-After`, in seconds.
AWAY_S = 60.0
# Returns after how many seconds a refused client should retry: of its load's priority, and how often a place
# for one becomes free (seconds).
RetryAfter = Callable[[str, float], float]
# Cached layouts: one for each shape of adapter, a few kilobytes of text.
LAYOUTS = 64
# Threads that read the catalog and fetch bytes: fewer than the catalog has connections.
THREADS = 8


def next_place(priority: str, free_each_s: float) -> float:
    """Return when the next place is free; whoever else was refused may be there first."""
    return min(max(1.0, free_each_s), AWAY_S)


def at_once(revision: Revision) -> int:
    """Return the default concurrency for loads of adapters of this size."""
    return LARGE_AT_ONCE if revision.length >= PAGE_ALIGNED_FROM else AT_ONCE


@dataclass(eq=False)
class Load:
    """One cold load, shared by all requests that wait for it; times are monotonic seconds."""

    name: str
    revision: Revision
    priority: str
    asked_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    waiters: set["asyncio.Future[None]"] = field(default_factory=set)
    asked_by: int = 0
    # Its catalog row may have gone since it was read.
    in_doubt: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def waited_s(self) -> float:
        """Seconds in the queue until the load started, or until now."""
        return (self.started_at or time.monotonic()) - self.asked_at


class LoadQueue:
    """Waiting and running loads. Interactive loads start first; `SHARE` keeps background loads going."""

    def __init__(self, places: int, concurrency: int | None = None, retry_after: RetryAfter = next_place):
        self.places, self._concurrency, self._retry_after = places, concurrency, retry_after
        self.waiting: dict[str, OrderedDict[str, Load]] = {priority: OrderedDict() for priority in PRIORITIES}
        # Not yet in line: the engine must forget their adapters first.
        self.returning: dict[str, Load] = {}
        self.running: dict[str, Load] = {}
        self._took_s = deque([FIRST_S] * RECENT, RECENT)
        self._in_a_row = 0

    def __len__(self) -> int:
        return sum(map(len, (*self.waiting.values(), self.returning, self.running)))

    def waits(self, priority: str) -> int:
        """Return how many loads of a priority have not started."""
        returning = sum(load.priority == priority for load in self.returning.values())
        return len(self.waiting[priority]) + returning

    @property
    def concurrency(self) -> int:
        """How many loads may run at once, for adapters of the sizes that run now."""
        if self._concurrency is not None:
            return self._concurrency
        return round(len(self.running) / self._taken(self.running.values())) if self.running else AT_ONCE

    @property
    def usual_s(self) -> float:
        """The median time in seconds for which a load takes a place."""
        return statistics.median(self._took_s)

    def _share(self, priority: str) -> int:
        """Return how many loads of a priority may run at once."""
        most = self.concurrency
        return max(1, int(most * BACKGROUND_RUNNING)) if priority == BACKGROUND else most

    def loads(self) -> list[Load]:
        """Return every load, running ones first."""
        return [load for loads in self._all() for load in loads.values()]

    def find(self, name: str) -> Load | None:
        """Return the waiting or running load of an adapter, or None."""
        return next((loads[name] for loads in self._all() if name in loads), None)

    def _all(self) -> "tuple[dict[str, Load], ...]":
        return (self.running, *self.waiting.values(), self.returning)

    def add(self, load: Load, is_returning: bool = False) -> None:
        """Add a load to the queue. Raises `Busy` with a `Retry-After` when the queue is full.

        A load that `is_returning` takes a place but cannot start until `line_up` is called.
        """
        background = load.priority == BACKGROUND
        taken = self.waits(BACKGROUND) if background else len(self)
        places = math.ceil(self.places * BACKGROUND_PLACES) if background else self.places
        if taken >= places or len(self) >= self.places:
            raise Busy(
                f"The queue of cold loads is full. Request {load.name} again later.",
                self._retry_after(load.priority, self.usual_s / self._share(load.priority)),
            )
        (self.returning if is_returning else self.waiting[load.priority])[load.name] = load

    def line_up(self, name: str) -> None:
        """Put a load that was returning into the line."""
        load = self.returning.pop(name)
        self.waiting[load.priority][name] = load

    def raise_priority(self, load: Load) -> None:
        """Make a background load interactive, because a user now waits for it."""
        if load.priority == BACKGROUND:
            load.priority = INTERACTIVE
            if self.waiting[BACKGROUND].pop(load.name, None):
                self.waiting[INTERACTIVE][load.name] = load

    def next(self) -> Load | None:
        """Return the next load and count it as running; None when none may start."""
        people, background = self.waiting[INTERACTIVE], self.waiting[BACKGROUND]
        held = [load for load in self.running.values() if load.priority == BACKGROUND]
        may = background and (not held or self._fits(background, held, BACKGROUND_RUNNING))
        if may and (not people or self._in_a_row >= SHARE):
            line = background
        elif people:
            line = people
        else:
            return None
        if not self._fits(line, self.running.values(), 1.0):
            return None
        self._in_a_row = self._in_a_row + 1 if line is people and background else 0
        name, load = line.popitem(last=False)
        self.running[name] = load
        load.started_at = time.monotonic()
        return load

    def _fits(self, line: "OrderedDict[str, Load]", held: Collection[Load], most: float) -> bool:
        """Return whether the first load of a line fits beside those in `held`, up to the share `most`."""
        return self._taken([*held, next(iter(line.values()))]) <= most + ROUNDING

    def _taken(self, loads: Iterable[Load]) -> float:
        """Return the share of all places that these loads take."""
        return sum(1 / (self._concurrency or at_once(load.revision)) for load in loads)

    def discard(self, load: Load) -> None:
        """Remove a load that was cancelled or failed; its duration does not count for estimates."""
        for loads in self._all():
            loads.pop(load.name, None)

    def end(self, load: Load) -> None:
        """Remove a load that succeeded, and add its duration to the estimate."""
        assert load.started_at is not None
        del self.running[load.name]
        self._took_s.append(time.monotonic() - load.started_at)

    def estimate_s(self) -> float:
        """Return in how many seconds an interactive load that is added now will be ready."""
        return self.usual_s * (1 + len(self) / self.concurrency)

    def told(self) -> dict[str, object]:
        """Return the queue for `/graftwork/residency`: counts, limits and every load by served name."""
        return {
            **{priority: self.waits(priority) for priority in PRIORITIES},
            "running": len(self.running),
            "places": self.places,
            "concurrency": self.concurrency,
            "estimate_s": self.estimate_s(),
            "loads": {
                load.name: {
                    "state": "queued" if load.started_at is None else "loading",
                    "priority": load.priority,
                    "waiters": len(load.waiters),
                    "waited_s": load.waited_s,
                }
                for load in self.loads()
            },
        }


class Engine(Protocol):
    """What a load needs of the engine."""

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        """Return once the engine takes requests for this name. Raises `AdapterError` if it refuses it."""

    async def forget(self, name: str) -> None:
        """Forget a name, with every trace, once the engine's last request for it has ended."""


class AdapterFetch:
    """Fetches revisions and has one engine prepare them."""

    def __init__(self, engine: Engine, catalog: Catalog, store: Store):
        self._engine, self._catalog, self._store = engine, catalog, store
        self._is_file = catalog.is_file
        self._threads = ThreadPoolExecutor(THREADS, "graftwork-fetch", limit_waits, (ANSWER_S,))
        self._layout = lru_cache(LAYOUTS)(catalog.layouts.get)

    async def bring(self, name: str, row: Revision) -> None:
        """Fetch a revision and have the engine prepare it; retry damaged or missing bytes once.

        Raises `DamagedBytes` after it has put the revision into quarantine, `MissingBytes`, and the errors
        of the engine's `prepare`.
        """
        for last in (False, True):
            try:
                return await self._engine.prepare(name, await self._fetched(row))
            except (DamagedBytes, MissingBytes) as fault:
                await self._engine.forget(name)
                better = None if last else await self.in_thread(self._look_again, row)
                if better is None:
                    if isinstance(fault, DamagedBytes):
                        await self.in_thread(self._catalog.quarantine.add, row.policy, row.digest, str(fault))
                    raise
                row = better

    async def confirm(self, row: Revision) -> None:
        """Raise `NotFound` when the row is gone by now, and `AdapterError` when it is in quarantine."""
        await self.in_thread(self._confirm, row)

    async def refuse_quarantined(self, row: Revision) -> None:
        """Raise `AdapterError` with the reason when a revision is in quarantine."""
        if self._is_file:
            return self._refuse_quarantined(row)
        return await self.in_thread(self._refuse_quarantined, row)

    def _refuse_quarantined(self, row: Revision) -> None:
        # Asked for each time: no gateway is told when a quarantine ends.
        now = self._catalog.revisions.standing(row.policy, row.digest)
        if now is not None and now.quarantine is not None:
            raise AdapterError(
                f"{served_name(row.policy, row.digest)} is in quarantine: {now.quarantine} "
                "Export the revision again to replace its bytes under the same name."
            )

    async def _fetched(self, row: Revision) -> dict[str, Any]:
        # A thread costs as much as the rest of a small load, so a local catalog and store do without.
        if self._store.is_remote or not self._is_file:
            return await self.in_thread(self._fetch, row)
        return self._fetch(row)

    def _fetch(self, row: Revision) -> dict[str, Any]:
        """Return the bytes' local address, after downloading them if the store is remote."""
        self._refuse_quarantined(row)
        path, offset = self._store.fetch(location(row))
        return {
            "path": str(path),
            "offset": offset,
            "length": row.length,
            "checksum": row.checksum,
            "layout": self._layout(row.layout),
        }

    def _confirm(self, row: Revision) -> None:
        self._catalog.revisions.get(row.policy, row.digest)
        self._refuse_quarantined(row)

    def _look_again(self, row: Revision) -> Revision | None:
        """Return the current row if a retry may succeed: the bytes moved, or a cached copy was dropped."""
        now = self._catalog.revisions.get(row.policy, row.digest)
        was_copy = self._store.drop_cached(location(row))
        return now if was_copy or location(now) != location(row) else None

    async def in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns that waits for the catalog or the store."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, work, *args)
