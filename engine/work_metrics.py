"""Prometheus metrics of the work in the background: how long ago each kind last succeeded, and its errors."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from engine.threads import WORKS


class WorkMetrics(Collector):
    """The metrics of this process's `WORKS`, as they are when they are asked for."""

    def __init__(self, registry: CollectorRegistry):
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the age and the errors of each work."""
        works = list(WORKS.values())
        age = GaugeMetricFamily(
            "graftwork_background_age_seconds", "Since a turn of the work succeeded.", labels=["work"]
        )
        errors = CounterMetricFamily("graftwork_background_errors", "Turns that failed.", labels=["work"])
        for work in works:
            age.add_metric([work.name], work.age_s)
            errors.add_metric([work.name], work.errors)
        yield from (age, errors)
