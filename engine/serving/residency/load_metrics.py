"""What Prometheus and the ledger are told of loads. No label names a revision: there may be a million."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.catalog.catalog import Revision
from engine.serving.residency.host_tier_cache import HostTierCache, Resident
from engine.serving.residency.load_queue import Load, LoadQueue

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
log = logging.getLogger("graftwork.loads")


class LoadMetrics:
    """Counters of loads, waits and evictions, and the sizes of tiers and queue; one for each registry."""

    def __init__(self, registry: CollectorRegistry):
        self.loads = Counter(
            "graftwork_loads", "Cold loads that ended.", ["priority", "outcome"], registry=registry
        )
        self.load_s = Histogram(
            "graftwork_load_seconds", "A cold load, once begun.", ["priority"], buckets=BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.wait_s = Histogram(
            "graftwork_load_wait_seconds", "A request's wait for its adapter, when it was cold.",
            ["priority"], buckets=BUCKETS, registry=registry,
        )  # fmt: skip
        self.hits = Counter("graftwork_warm_requests", "Requests whose adapter was there.", registry=registry)
        self.refused = Counter(
            "graftwork_loads_refused", "Requests that found the queue full.", ["priority"], registry=registry
        )
        self.untold = Counter(
            "graftwork_loads_untold",
            "Loads and evictions that the ledger was not told of.",
            registry=registry,
        )
        self.evictions = Counter(
            "graftwork_evictions", "Adapters that left the host tier.", registry=registry
        )
        self.adapters = Gauge("graftwork_tier_adapters", "Adapters in a tier.", ["tier"], registry=registry)
        self.bytes = Gauge("graftwork_tier_bytes", "Bytes of a tier.", ["tier"], registry=registry)
        self.slot_fills = Counter(
            "graftwork_slot_fills", "Adapters that were copied into a slot.", registry=registry
        )
        self.slot_evictions = Counter(
            "graftwork_slot_evictions", "Adapters that left their slot for another.", registry=registry
        )
        self._counted: dict[str, int] = {}
        self.queue = Gauge("graftwork_load_queue", "Cold loads that wait.", ["priority"], registry=registry)
        self.running = Gauge("graftwork_loads_running", "Cold loads that run.", registry=registry)

    def watch(self, tier: HostTierCache, queue: LoadQueue) -> None:
        """Read these whenever somebody looks."""
        self.adapters.labels("host").set_function(lambda: len(tier.residents))
        self.bytes.labels("host").set_function(lambda: tier.bytes)
        self.running.set_function(lambda: len(queue.running))
        for priority, line in queue.waiting.items():
            self.queue.labels(priority).set_function(partial(len, line))

    def count_slots(self, worker: Mapping[str, Any]) -> None:
        """Take over what a worker has counted since it started."""
        for counter, name in ((self.slot_fills, "activations"), (self.slot_evictions, "slot_evictions")):
            counter.inc(worker[name] - self._counted.get(name, 0))
            self._counted[name] = worker[name]


class LoadLog:
    """Counts what became of each load, and tells the ledger (its table `loads`) by `tell`. Never raises."""

    def __init__(self, metrics: LoadMetrics, tell: Callable[..., object], tier: HostTierCache):
        self._metrics, self._tell, self._tier = metrics, tell, tier

    def ended(self, load: Load, outcome: str, error: str | None) -> None:
        """A load is `ready`, `refused` or `cancelled`; `error` says why it is not ready."""
        now = time.monotonic()
        self._metrics.loads.labels(load.priority, outcome).inc()
        if load.started_at is not None:
            self._metrics.load_s.labels(load.priority).observe(now - load.started_at)
        self._emit(
            load.revision, "host", now - (load.started_at or now), error=error, outcome=outcome,
            wait_s=load.waited_s, priority=load.priority, waiters=load.asked_by,
        )  # fmt: skip

    def evicted(self, resident: Resident) -> None:
        """An adapter has left the host tier; its row's seconds are how long it was there."""
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
            # A full disk, say: who waits for an adapter does not wait for the ledger.
            self._metrics.untold.inc()
            log.warning("A load of %s is missing in the ledger: %s", revision.policy, error)
