"""What Prometheus and the ledger are told of loads. No label names a revision: there may be a million."""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.catalog.catalog import Revision
from engine.serving.residency.host_tier_cache import HostTierCache, Resident
from engine.serving.residency.load_queue import PRIORITIES, Load, LoadQueue
from engine.serving.residency.states import AdapterStates
from engine.serving.worker.load_channel import SlotReport

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
log = logging.getLogger("graftwork.loads")


class LoadMetrics:
    """Counters of loads, waits and evictions, and the sizes of tiers and queue; one for each registry."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry
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
        self._counted = 0, 0
        self.queue = Gauge("graftwork_load_queue", "Cold loads that wait.", ["priority"], registry=registry)
        self.running = Gauge("graftwork_loads_running", "Cold loads that run.", registry=registry)

    def watch(self, tier: HostTierCache, queue: LoadQueue, states: AdapterStates) -> None:
        """Read these whenever somebody looks."""
        self._registry.register(StatesCollector(states))
        self.adapters.labels("slot").set_function(lambda: len(states.in_slots))
        self.bytes.labels("slot").set_function(
            lambda: sum(tier.residents[name].bytes for name in states.in_slots)
        )
        self.adapters.labels("host").set_function(lambda: len(tier.residents))
        self.bytes.labels("host").set_function(lambda: tier.bytes)
        self.running.set_function(lambda: len(queue.running))
        for priority in PRIORITIES:
            self.queue.labels(priority).set_function(partial(queue.waits, priority))

    def count_slots(self, report: SlotReport) -> None:
        """Take over what a worker has counted since it started."""
        self.slot_fills.inc(report.activations - self._counted[0])
        self.slot_evictions.inc(report.slot_evictions - self._counted[1])
        self._counted = report.activations, report.slot_evictions


class StatesCollector(Collector):
    """Tells Prometheus how many adapters are in each state, and how often each transition was made."""

    def __init__(self, states: AdapterStates):
        self._states = states

    def collect(self) -> Iterator[Metric]:
        adapters = GaugeMetricFamily(
            "graftwork_adapters", "Adapters that are not only stored.", labels=["state"]
        )
        for state, count in self._states.counts().items():
            adapters.add_metric([state], count)
        yield adapters
        made = CounterMetricFamily(
            "graftwork_adapter_transitions",
            "Changes of an adapter's state.",
            labels=["before", "event", "after"],
        )
        for transition, count in list(self._states.transitions.items()):
            made.add_metric(transition, count)
        yield made


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
