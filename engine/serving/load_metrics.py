"""What Prometheus reads of the host tier. No label names a revision: there may be a million of them."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.serving.load_queue import PRIORITIES

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


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
        self.evictions = Counter(
            "graftwork_evictions", "Adapters that left the host tier.", registry=registry
        )
        self.adapters = Gauge("graftwork_tier_adapters", "Adapters in a tier.", ["tier"], registry=registry)
        self.bytes = Gauge("graftwork_tier_bytes", "Bytes of a tier.", ["tier"], registry=registry)
        self.queue = Gauge("graftwork_load_queue", "Cold loads that wait.", ["priority"], registry=registry)

    def watch(
        self, adapters: Callable[[], float], size: Callable[[], float], waiting: Callable[[str], float]
    ) -> None:
        """Read these whenever somebody looks."""
        self.adapters.labels("host").set_function(adapters)
        self.bytes.labels("host").set_function(size)
        for priority in PRIORITIES:
            self.queue.labels(priority).set_function(partial(waiting, priority))
