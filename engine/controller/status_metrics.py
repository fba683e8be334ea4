"""Prometheus metrics of what a controller looks after, as it is when they are asked for."""

import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.controller.alarms import alarms
from engine.controller.release_loop import Controller
from engine.errors import GraftworkError
from engine.state_metrics import StateMetrics


class StatusMetrics(Collector):
    """The ledger's size and ages, alarms, and notifications that wait."""

    def __init__(self, controller: Controller):
        self._controller = controller
        StateMetrics(controller.metrics.registry, controller.params.paths)
        controller.metrics.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics; what cannot be read now is left out."""
        controller, paths, now = self._controller, self._controller.params.paths, time.time()
        yield _gauge("alarms", "Alarms.", len(alarms(controller)))
        taken = controller.ingested_at or controller.started_at
        yield _gauge("ingest_age_seconds", "Since all events were taken.", now - taken)
        with suppress(OSError):
            yield _gauge("ledger_bytes", "Bytes of the ledger.", paths.ledger.stat().st_size)
        with suppress(OSError):
            written = paths.ledger_snapshot.stat().st_mtime
            yield _gauge("snapshot_age_seconds", "Since the readers' ledger was written.", now - written)
        with suppress(GraftworkError):
            waiting = controller.catalog.notices.count_unsent()
            yield _gauge("notifications_unsent", "Notifications that wait.", waiting)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"graftwork_{name}", what, value=value)
