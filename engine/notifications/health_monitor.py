"""Watches the engine's health and champions' drift, on a thread of its own.

Each finding is one notification.
"""

import time

from engine.catalog.catalog import Catalog
from engine.clients.engine import EngineClient
from engine.controller.due import drift
from engine.controller.facts import gather
from engine.errors import GraftworkError
from engine.notifications.notices import notify
from engine.settings.params import Params, known_policies
from engine.threads import PeriodicThread

EVERY_S = 3.0
DRIFT_EVERY_S = 30.0
MISSES = 3
TIMEOUT_S = 2.0


class HealthMonitor(PeriodicThread):
    """Notifies when the engine goes down or comes back, and when a champion has drifted."""

    def __init__(self, catalog: Catalog, params: Params):
        super().__init__("health-monitor", EVERY_S, self.look)
        self._catalog = catalog
        self._params = params
        self.engine = EngineClient(params.url("engine"), timeout_s=TIMEOUT_S)
        self._seen = False
        self._misses = 0
        self._down_since: float | None = None
        self._drift_due = 0.0

    def look(self) -> None:
        """Check the engine; every `DRIFT_EVERY_S` also check the champions."""
        self._look_at_engine()
        if time.monotonic() >= self._drift_due:
            self._drift_due = time.monotonic() + DRIFT_EVERY_S
            self._look_at_champions()

    def _look_at_engine(self) -> None:
        link = f"{self._params.url('controller')}/"
        if self.engine.is_healthy():
            if self._down_since is not None:
                reason = f"Back after {time.time() - self._down_since:.0f} s."
                notify(self._catalog, "engine.up", reason, link, str(self._down_since))
            self._seen, self._misses, self._down_since = True, 0, None
            return
        # An engine that has not been up yet is starting; that is not an outage.
        self._misses += self._seen
        if self._misses == MISSES:
            self._down_since = time.time()
            reason = f"The engine at {self._params.url('engine')} has not answered {MISSES} times in a row."
            notify(self._catalog, "engine.down", reason, link, str(self._down_since))

    def _look_at_champions(self) -> None:
        for name in known_policies(self._params):
            try:
                facts = gather(self._params, name, self._catalog)
                champion = self._catalog.routes.get(name).champion if facts.config.drift_after_s else None
            except GraftworkError:
                continue
            if champion and (why := drift(facts)):
                # Once for each champion.
                link = f"{self._params.url('controller')}/"
                notify(self._catalog, "policy.drift", why, link, "", name, champion)
