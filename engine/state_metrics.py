"""Prometheus metrics of a process's state directory: events that wait in its spool, and free disk."""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from engine.ledger.spool import REJECTED
from engine.settings.params import Paths


class StateMetrics(Collector):
    """The metrics of a state directory, as it is when they are asked for."""

    def __init__(self, registry: CollectorRegistry, paths: Paths):
        self._paths = paths
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the spool's files, bytes, age and rejected files, and the free bytes of the disk."""
        count, size, oldest, now = 0, 0, None, time.time()
        for path in self._paths.spool.glob("*"):
            # The reader may take it meanwhile.
            with suppress(FileNotFoundError):
                stat = path.stat()
                if path.suffix in (".jsonl", ".open") and stat.st_size:
                    count, size = count + 1, size + stat.st_size
                    oldest = min(oldest or stat.st_mtime, stat.st_mtime)
        age_s = max(0.0, now - oldest) if oldest else 0.0
        rejected = sum(1 for _ in self._paths.spool.glob(f"{REJECTED}/*"))
        yield GaugeMetricFamily("graftwork_spool_files", "Files of events that wait.", value=count)
        yield GaugeMetricFamily("graftwork_spool_bytes", "Bytes of events that wait.", value=size)
        yield GaugeMetricFamily("graftwork_spool_age_seconds", "Age of the oldest of them.", value=age_s)
        yield GaugeMetricFamily(
            "graftwork_spool_rejected_files", "Files with events that nobody takes.", value=rejected
        )
        with suppress(OSError):
            free = shutil.disk_usage(self._paths.root).free
            yield GaugeMetricFamily("graftwork_disk_free_bytes", "Free in the state directory.", value=free)
