"""The age of the last backup, as a Prometheus metric."""

import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from engine.backup.place import BACKED_UP
from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog
from engine.errors import GraftworkError

LOOK_S = 60.0


class BackupAge(Collector):
    """Tells of the last backup in the catalog's audit log, else of the installation's beginning."""

    def __init__(self, registry: CollectorRegistry, catalog: Catalog):
        self._catalog = catalog
        self._backup_at, self._looked_at = 0.0, -LOOK_S
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric, or nothing while the catalog cannot be read."""
        with suppress(GraftworkError):
            age_s = time.time() - self._backup()
            what = "Since the last backup, or the start."
            yield GaugeMetricFamily("graftwork_backup_age_seconds", what, value=age_s)

    def _backup(self) -> float:
        """Return when the installation was last backed up, else when it began; looked up once a minute."""
        if time.monotonic() - self._looked_at > LOOK_S:
            audit = Audit(self._catalog.access)
            entry = audit.newest_of(BACKED_UP) or next(iter(audit.page(limit=1)), None)
            self._backup_at, self._looked_at = entry.at if entry else time.time(), time.monotonic()
        return self._backup_at
