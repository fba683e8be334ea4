"""Prometheus metrics of cold loads and tiers. No label names a revision: there may be a million."""

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.serving.residency.host_tier_index import AdapterStates, HostTierIndex
from engine.serving.residency.loads import PRIORITIES, LoadQueue

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class LoadMetrics:
    """Counters of loads, waits and evictions, and sizes of tiers and queue; one instance a registry."""

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.loads = Counter(
            "graftwork_loads", "Cold loads that ended.", ["priority", "outcome"], registry=registry
        )
        self.load_s = Histogram(
            "graftwork_load_seconds", "Duration of a cold load, without its wait.",
            ["priority"], buckets=BUCKETS, registry=registry,
        )  # fmt: skip
        self.wait_s = Histogram(
            "graftwork_load_wait_seconds", "A request's wait for a cold adapter.",
            ["priority"], buckets=BUCKETS, registry=registry,
        )  # fmt: skip
        self.hits = Counter("graftwork_warm_requests", "Requests with a warm adapter.", registry=registry)
        self.refused = Counter(
            "graftwork_loads_refused", "Requests refused by a full queue.", ["priority"], registry=registry
        )
        self.untold = Counter(
            "graftwork_loads_untold",
            "Loads and evictions missing in the ledger.",
            registry=registry,
        )
        self.evictions = Counter(
            "graftwork_evictions", "Adapters evicted from the host tier.", registry=registry
        )
        self.adapters = Gauge("graftwork_tier_adapters", "Adapters in a tier.", ["tier"], registry=registry)
        self.bytes = Gauge("graftwork_tier_bytes", "Bytes of a tier.", ["tier"], registry=registry)
        self.slot_fills = Counter("graftwork_slot_fills", "Adapters copied into a slot.", registry=registry)
        self.slot_evictions = Counter(
            "graftwork_slot_evictions", "Adapters evicted from a slot.", registry=registry
        )
        self.queue = Gauge("graftwork_load_queue", "Cold loads that wait.", ["priority"], registry=registry)
        self.running = Gauge("graftwork_loads_running", "Cold loads that run.", registry=registry)

    def watch(self, tier: HostTierIndex, queue: LoadQueue, states: AdapterStates) -> None:
        """Export tier, queue and states; they are read at each scrape."""
        self.registry.register(StatesCollector(states))
        self.adapters.labels("slot").set_function(lambda: len(states.in_slots))
        self.bytes.labels("slot").set_function(
            lambda: sum(tier.residents[name].bytes for name in states.in_slots)
        )
        self.adapters.labels("host").set_function(lambda: len(tier.residents))
        self.bytes.labels("host").set_function(lambda: tier.bytes)
        self.running.set_function(lambda: len(queue.running))
        for priority in PRIORITIES:
            self.queue.labels(priority).set_function(partial(queue.waits, priority))


class StatesCollector(Collector):
    """Exports the number of adapters in each state and the count of each transition."""

    def __init__(self, states: AdapterStates):
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """Yield both metrics, for Prometheus."""
        adapters = GaugeMetricFamily(
            "graftwork_adapters", "Adapters by state, without those only stored.", labels=["state"]
        )
        for state, count in self._states.counts().items():
            adapters.add_metric([state], count)
        yield adapters
        made = CounterMetricFamily(
            "graftwork_adapter_transitions",
            "Transitions between adapter states.",
            labels=["before", "event", "after"],
        )
        for transition, count in list(self._states.transitions.items()):
            made.add_metric(transition, count)
        yield made
