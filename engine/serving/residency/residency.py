"""Residency: bring cold adapters into the host tier, and evict unused ones when it is full.

A cold load is scheduled work with its own bounded queue (loads.py, which also fetches its bytes); a request
waits for it outside the engine. Concurrent misses of one adapter share a load, which is cancelled when its
last waiter leaves. Each adapter is in one state of host_tier_index.py, which also chooses which adapters are
evicted, and only this module changes it. Everything runs in one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry

from engine.catalog.catalog import Catalog, Revision
from engine.catalog.records import served_name
from engine.errors import Busy, GraftworkError, ServiceError
from engine.planning.tiers import host_tier_adapters, host_tier_bytes
from engine.serving.residency.host_tier_index import (
    AdapterEvent,
    AdapterState,
    AdapterStates,
    HostTierIndex,
    Resident,
    refuse_twin,
)
from engine.serving.residency.load_metrics import LoadMetrics
from engine.serving.residency.loads import (
    BACKGROUND,
    INTERACTIVE,
    LOAD_PLACES,
    AdapterFetch,
    Engine,
    Load,
    LoadQueue,
    RetryAfter,
    next_place,
)
from engine.serving.worker.load_channel import SlotReport
from engine.settings.services import EngineConfig
from engine.store.segments import Store

log = logging.getLogger("graftwork.residency")
loads_log = logging.getLogger("graftwork.loads")
# Faults of loads that are kept.
MOST_FAULTS = 256
LOAD_TIMEOUT_S = 60.0


class LoadLog:
    """Counts loads and evictions, and passes them to `tell`, for the ledger's table `loads`. Never raises."""

    def __init__(self, metrics: LoadMetrics, tell: Callable[..., object], tier: HostTierIndex):
        self._metrics, self._tell, self._tier = metrics, tell, tier
        # Slots' fills and evictions in the worker's last report.
        self._counted = 0, 0

    def slots(self, report: SlotReport) -> None:
        """Add a worker's counts of slot fills and evictions since its last report."""
        self._metrics.slot_fills.inc(report.activations - self._counted[0])
        self._metrics.slot_evictions.inc(report.slot_evictions - self._counted[1])
        self._counted = report.activations, report.slot_evictions

    def ended(self, load: Load, outcome: str, error: str | None) -> None:
        """Record a load's outcome: `ready`, `refused` or `cancelled`, the last two with an `error`."""
        now = time.monotonic()
        self._metrics.loads.labels(load.priority, outcome).inc()
        if load.started_at is not None:
            self._metrics.load_s.labels(load.priority).observe(now - load.started_at)
        self._emit(
            load.revision, "host", now - (load.started_at or now), error=error, outcome=outcome,
            wait_s=load.waited_s, priority=load.priority, waiters=load.asked_by,
        )  # fmt: skip

    def evicted(self, resident: Resident) -> None:
        """Record that an adapter left the host tier; `seconds` of its row is how long it was there."""
        self._metrics.evictions.inc()
        self._emit(resident.revision, "stored", time.monotonic() - resident.loaded_at)

    def _emit(self, revision: Revision, tier: str, seconds: float, **more: object) -> None:
        try:
            self._tell(
                policy=revision.policy,
                digest=revision.digest,
                tier=tier,
                bytes=revision.length,
                seconds=seconds,
                tier_adapters=len(self._tier.residents),
                tier_bytes=self._tier.bytes,
                **more,
            )
        except Exception as error:
            # For instance a full disk: the ledger must never fail a request.
            self._metrics.untold.inc()
            loads_log.warning("A load of %s could not be recorded in the ledger: %s", revision.policy, error)


class Residency:
    """The gateway's view of the host tier: hold and release adapters, load them ahead, evict them."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        store: Store,
        config: EngineConfig,
        on_load: Callable[..., object] = lambda **fields: None,
        pinned: Callable[[], Collection[str]] = frozenset,
        metrics: LoadMetrics | None = None,
        retry_after: RetryAfter = next_place,
        load_places: int = LOAD_PLACES,
        timeout_s: float = LOAD_TIMEOUT_S,
        most_adapters: int | None = None,
    ):
        """Connect engine, catalog and store.

        `on_load` records a load, `pinned` names adapters that stay, `timeout_s` bounds a load with its wait,
        `most_adapters` the host tier.
        """
        self.queue = LoadQueue(load_places, config.load_concurrency, retry_after)
        self.states = AdapterStates()
        self.evictions = 0
        # What the newest loads that failed said, by served name.
        self.faults: dict[str, str] = {}
        self._engine = engine
        self.fetch = AdapterFetch(engine, catalog, store)
        self._timeout_s = timeout_s
        self._pinned = pinned
        # Loads ahead and calls to forget; asyncio keeps only weak references to tasks.
        self.tasks: set[asyncio.Task[None]] = set()
        self.metrics = metrics or LoadMetrics(CollectorRegistry())
        most_adapters = most_adapters or host_tier_adapters(config)
        self.tier = HostTierIndex(host_tier_bytes(config), most_adapters, on_hit=self.metrics.hits.inc)
        self.metrics.watch(self.tier, self.queue, self.states)
        self._log = LoadLog(self.metrics, on_load, self.tier)

    @property
    def residents(self) -> dict[str, Resident]:
        """The adapters in the host tier by served name."""
        return self.tier.residents

    def is_loading(self, name: str) -> bool:
        """Return whether a load of this adapter waits or runs."""
        return self.queue.find(name) is not None

    async def hold(self, revision: Revision, priority: str = INTERACTIVE) -> str:
        """Bring a revision into the host tier and hold it until `release`; return its served name.

        Raises `Busy` when the queue is full, `AdapterError` when the engine refuses the adapter and
        `ServiceError` when it is not there within `LOAD_TIMEOUT_S`.
        """
        name = self.tier.ask(revision)
        if name is None:
            load, waiter = self._ask(revision, priority)
            await self._wait(load, waiter)
            name = load.name
        return name

    def release(self, name: str, is_use: bool = True) -> None:
        """End a hold; `is_use` says whether a request used the adapter."""
        if self.tier.release(name, is_use):
            self.make_room(name)

    def make_room(self, name: str) -> None:
        """Evict what is to leave after the release of this adapter."""
        if self.tier.residents[name].is_lost:
            self.evict(name, AdapterEvent.RELEASE)
        self._evict_idle()

    def lose(self, name: str) -> None:
        """Note that bytes are lost or in quarantine: the adapter leaves after its last request."""
        if self.states.move(name, AdapterEvent.LOSE) is AdapterState.LOST:
            self.tier.lose(name)
            self.evict(name, AdapterEvent.RELEASE)

    def take_report(self, in_slots: Collection[str], lost: Collection[str], report: SlotReport) -> None:
        """Apply a worker's report: which adapters are in a slot now, and which have lost their bytes."""
        self._log.slots(report)
        for name in lost:
            self.lose(name)
        for name in self.states.in_slots.difference(in_slots):
            self.states.move(name, AdapterEvent.CLEAR)
        for name in in_slots:
            self.states.move(name, AdapterEvent.FILL)

    def evict(self, name: str, event: AdapterEvent = AdapterEvent.EVICT) -> bool:
        """Evict an adapter that no request uses, one that is gone from the catalog; else return False."""
        resident = self.residents.get(name)
        if resident is None or resident.users:
            return False
        self._leave([(name, self.tier.evict(name))], event)
        return True

    def doubt(self, policies: Collection[str] | None) -> None:
        """Make loads of these policies (None: all) check their catalog row again before they end."""
        for load in self.queue.loads():
            load.in_doubt |= policies is None or load.revision.policy in policies

    def load_ahead(self, revision: Revision) -> None:
        """Load a revision in the background, before requests for it.

        Raises `Busy` for a full queue, and as `HostTierIndex.find`.
        """
        if self.tier.find(revision) is not None:
            return
        load, waiter = self._ask(revision, BACKGROUND)

        async def keep() -> None:
            # A request for this adapter will get the error.
            with suppress(GraftworkError):
                await self._wait(load, waiter)
                # It counts as no use: else what nobody asks for would be warm.
                self.release(load.name, is_use=False)

        self._keep(keep())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _ask(self, revision: Revision, priority: str) -> "tuple[Load, asyncio.Future[None]]":
        """Return the load of a revision, new or shared, and a future that ends with it."""
        name = served_name(revision.policy, revision.digest)
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
            self.faults.pop(load.name, None)
            if fault is None:
                self._ready(load)
            else:
                self._refuse(load, fault)
            self._evict_idle()
        finally:
            # The queue must move on after any error.
            self._start()

    def _ready(self, load: Load) -> None:
        """Add a loaded adapter to the tier, held by each of its waiters, and wake them."""
        self.queue.end(load)
        self.states.move(load.name, AdapterEvent.READY)
        self.tier.ready(load.name, load.revision)
        for waiter in load.waiters:
            if not waiter.done():
                self.tier.hold(load.name)
                waiter.set_result(None)
        self._log.ended(load, "ready", None)

    def _refuse(self, load: Load, fault: Exception) -> None:
        """Have a refused adapter forgotten, and tell its waiters why."""
        self.faults[load.name] = str(fault)
        if len(self.faults) > MOST_FAULTS:
            del self.faults[next(iter(self.faults))]
        self.queue.discard(load)
        self.states.move(load.name, AdapterEvent.REFUSE)
        self._forget(load.name)
        for waiter in load.waiters:
            if not waiter.done():
                waiter.set_exception(fault)
        self._log.ended(load, "refused", str(fault))

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
        return ServiceError(f"{load.name} was not loaded within {self._timeout_s:g} s. Try again.")
