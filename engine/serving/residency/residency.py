"""Residency: bring cold adapters into the host tier, and evict unused ones when it is full.

A cold load is scheduled work with its own bounded queue (load_queue.py); a request waits for it outside the
engine. Concurrent misses of one adapter share a load, which is cancelled when its last waiter leaves. Each
adapter is in one state of states.py, and only this module changes it. adapter_fetch.py gets the bytes,
host_tier_cache.py chooses which adapters to evict. Everything runs in one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry

from engine.catalog.catalog import Catalog, Revision
from engine.errors import Busy, GraftworkError, ServiceError
from engine.planning.tiers import host_tier_bytes
from engine.serving.residency.adapter_fetch import AdapterFetch, Engine
from engine.serving.residency.host_tier_cache import HostTierCache, Resident, refuse_twin
from engine.serving.residency.load_metrics import LoadLog, LoadMetrics
from engine.serving.residency.load_queue import BACKGROUND, INTERACTIVE, Load, LoadQueue
from engine.serving.residency.states import AdapterEvent, AdapterState, AdapterStates
from engine.serving.worker.load_channel import SlotReport
from engine.settings.params import served_name
from engine.settings.services import EngineConfig
from engine.store.segments import Store

log = logging.getLogger("graftwork.residency")


# Faults of loads that are kept.
MOST_FAULTS = 256


class Residency:
    """The gateway's view of the host tier: hold, release, prewarm and drop adapters."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        store: Store,
        config: EngineConfig,
        on_load: Callable[..., object] = lambda **fields: None,
        pinned: Callable[[], Collection[str]] = frozenset,
        metrics: LoadMetrics | None = None,
    ):
        self.queue = LoadQueue(config.load_queue, config.load_concurrency)
        self.states = AdapterStates()
        self.evictions = 0
        # What the newest loads that failed said, by served name.
        self.faults: dict[str, str] = {}
        self._engine = engine
        self.fetch = AdapterFetch(engine, catalog, store)
        self._timeout_s = config.load_timeout_s
        self._pinned = pinned
        # Prewarms and calls to forget; asyncio keeps only weak references to tasks.
        self.tasks: set[asyncio.Task[None]] = set()
        self.metrics = metrics or LoadMetrics(CollectorRegistry())
        self.tier = HostTierCache(host_tier_bytes(config), config.host_adapters, on_hit=self.metrics.hits.inc)
        self.metrics.watch(self.tier, self.queue, self.states)
        self._log = LoadLog(self.metrics, on_load, self.tier)

    @property
    def residents(self) -> dict[str, Resident]:
        """The adapters in the host tier by served name."""
        return self.tier.residents

    @property
    def loading(self) -> int:
        """The number of cold loads that wait or run."""
        return len(self.queue)

    def is_loading(self, name: str) -> bool:
        """Return whether a load of this adapter waits or runs."""
        return self.queue.find(name) is not None

    async def hold(self, revision: Revision, priority: str = INTERACTIVE) -> str:
        """Bring a revision into the host tier and hold it until `release`; return its served name.

        Raises `Busy` when the queue is full, `AdapterError` when the engine refuses the adapter and
        `ServiceError` when it is not there within `engine.load_timeout_s`.
        """
        name = self.tier.ask(revision)
        if name is None:
            load, waiter = self._join(revision, priority)
            await self._wait(load, waiter)
            name = load.name
        return name

    async def refuse_quarantined(self, revision: Revision) -> None:
        """Raise `AdapterError` when a revision is in quarantine now."""
        await self.fetch.refuse_quarantined(revision)

    def release(self, name: str, is_use: bool = True) -> None:
        """End a hold; `is_use` says whether a request used the adapter."""
        if self.tier.release(name, is_use):
            self.make_room(name)

    def make_room(self, name: str) -> None:
        """Remove what is to leave after the release of this adapter."""
        if self.tier.residents[name].is_lost:
            self.evict(name, AdapterEvent.RELEASE)
        self._evict_idle()

    def lose(self, name: str) -> None:
        """Remove an adapter whose bytes are lost or in quarantine; the next request reloads it."""
        if self.states.move(name, AdapterEvent.LOSE) is AdapterState.LOST:
            self.tier.residents[name].is_lost = True
            self.evict(name, AdapterEvent.RELEASE)

    def take_report(self, in_slots: Collection[str], lost: Collection[str], report: SlotReport) -> None:
        """Apply a worker's report: which adapters are in a slot now, and which have lost their bytes."""
        self.metrics.count_slots(report)
        for name in lost:
            self.lose(name)
        for name in self.states.in_slots.difference(in_slots):
            self.states.move(name, AdapterEvent.CLEAR)
        for name in in_slots:
            self.states.move(name, AdapterEvent.FILL)

    def evict(self, name: str, event: AdapterEvent = AdapterEvent.EVICT) -> bool:
        """Remove an adapter that no request uses, one that is gone from the catalog; else return False."""
        resident = self.tier.evict(name)
        if resident is not None:
            self._leave([(name, resident)], event)
        return resident is not None

    def doubt(self, policies: Collection[str] | None) -> None:
        """Make loads of these policies (None: all) check their catalog row again before they end."""
        for load in self.queue.loads():
            load.in_doubt |= policies is None or load.revision.policy in policies

    def prewarm(self, revision: Revision, is_use: bool = True) -> float:
        """Load a revision in the background; return the estimated time until it is ready, in seconds.

        `is_use` says whether a client asked for it, which counts towards its popularity. Raises `Busy` when
        the queue is full.
        """
        name = served_name(revision.policy, revision.digest)
        if not is_use and name in self.residents:
            return 0.0
        if is_use and self.tier.ask(revision) is not None:
            self.release(name)
            return 0.0
        load, waiter = self._join(revision, BACKGROUND, is_use)

        async def keep() -> None:
            # A request for this adapter will get the error.
            with suppress(GraftworkError):
                await self._wait(load, waiter)
                self.release(load.name, is_use)

        self._keep(keep())
        return self.queue.estimate_s(load)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _join(
        self, revision: Revision, priority: str, is_use: bool = True
    ) -> "tuple[Load, asyncio.Future[None]]":
        """Return the load of a revision, new or shared, and a future that ends with it."""
        name = served_name(revision.policy, revision.digest)
        if is_use:
            self.tier.popularity.add(name)
        load = self.queue.find(name)
        if load is None:
            load = Load(name, revision, priority)
            try:
                self.queue.add(load, is_returning=self.states.state(name) is AdapterState.LEAVING)
            except Busy:
                self.metrics.refused.labels(priority).inc()
                raise
        else:
            refuse_twin(load.revision, revision)
            if priority == INTERACTIVE:
                self.queue.raise_priority(load)
        self.states.move(name, AdapterEvent.ASK)
        waiter = asyncio.get_running_loop().create_future()
        load.waiters.add(waiter)
        load.asked_by += 1
        self._start()
        return load, waiter

    async def _wait(self, load: Load, waiter: "asyncio.Future[None]") -> None:
        """Wait until the load has ended; the adapter is then held once for this waiter."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await waiter
        except BaseException as error:
            # Mostly a client that left. The adapter may already be held for this waiter.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(load.name)
            load.waiters.discard(waiter)
            if not load.waiters:
                self._cancel(load)
            if isinstance(error, TimeoutError):
                raise self._too_late(load) from None
            raise
        finally:
            self.metrics.wait_s.labels(load.priority).observe(time.monotonic() - began)

    def _cancel(self, load: Load) -> None:
        """Cancel a load without waiters, queued or running."""
        if self.queue.find(load.name) is not load:
            return
        self.queue.discard(load)
        self.states.move(load.name, AdapterEvent.CANCEL)
        if load.task is not None:
            load.task.cancel()
            self._forget(load.name, load.task)
        self._log.ended(load, "cancelled", "Every client that waited for it has left.")
        self._start()

    def _start(self) -> None:
        while (load := self.queue.next()) is not None:
            self.states.move(load.name, AdapterEvent.START)
            load.task = asyncio.create_task(self._run(load))

    async def _run(self, load: Load) -> None:
        fault: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.fetch.bring(load.name, load.revision)
                while load.in_doubt:
                    load.in_doubt = False
                    await self.fetch.confirm(load.revision)
        except TimeoutError:
            fault = self._too_late(load)
        except GraftworkError as error:
            fault = error
        except Exception as error:
            # Any error must reach the waiters, or they would wait until their timeout.
            fault = ServiceError(f"{load.name} was not loaded: {error!r}. See the engine's log.")
        try:
            self._end(load, fault)
        finally:
            # The queue must move on after any error.
            self._start()

    def _end(self, load: Load, fault: Exception | None) -> None:
        """Add a loaded adapter to the tier, or have a refused one forgotten; then wake the waiters."""
        if fault is None:
            self.queue.end(load)
            self.states.move(load.name, AdapterEvent.READY)
            self.tier.ready(load.name, load.revision)
            self.faults.pop(load.name, None)
        else:
            self.faults.pop(load.name, None)
            self.faults[load.name] = str(fault)
            if len(self.faults) > MOST_FAULTS:
                del self.faults[next(iter(self.faults))]
            self.queue.discard(load)
            self.states.move(load.name, AdapterEvent.REFUSE)
            self._forget(load.name)
        for waiter in load.waiters:
            if waiter.done():
                continue
            if fault is None:
                self.tier.hold(load.name)
                waiter.set_result(None)
            else:
                waiter.set_exception(fault)
        self._log.ended(load, "refused" if fault else "ready", str(fault) if fault else None)
        self._evict_idle()

    def _evict_idle(self) -> None:
        """Evict adapters until the tier is within its limits."""
        try:
            gone = self.tier.make_room(self._pinned)
        except ServiceError:
            # Without the list of pinned adapters none is evicted; the next load or request tries again.
            log.exception("Eviction from the host tier is suspended: cannot read which adapters must stay.")
            return
        self._leave(gone, AdapterEvent.EVICT)

    def _leave(self, gone: list[tuple[str, Resident]], event: AdapterEvent) -> None:
        self.evictions += len(gone)
        for name, _ in gone:
            self.states.move(name, event)
            self._forget(name)
        for _, resident in gone:
            self._log.evicted(resident)

    def _forget(self, name: str, after: "asyncio.Task[None] | None" = None) -> None:
        """Have the engine forget an adapter that is leaving, once the task `after` (its load) has ended."""

        async def forget() -> None:
            if after is not None:
                await asyncio.wait([after])
            try:
                await self._engine.forget(name)
            except ServiceError as error:
                # Harmless: under this name the engine keeps the same bytes, already prepared.
                log.error("The engine could not forget %s: %s", name, error)
            if self.states.move(name, AdapterEvent.FORGET) is AdapterState.QUEUED:
                self.queue.line_up(name)
                self._start()

        self._keep(forget())

    def _too_late(self, load: Load) -> ServiceError:
        return ServiceError(
            f"{load.name} was not loaded within {self._timeout_s:g} s (engine.load_timeout_s). Try again."
        )
