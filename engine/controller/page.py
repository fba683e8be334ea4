"""The controller's page: the report as of now, with what is wrong now, which renews itself while it is open.

Everything of it comes from this server: no outside resources.
"""

import threading
import time
from typing import TYPE_CHECKING

from engine.errors import NotFound
from engine.report.pages import MAX_POLICIES, ReportData, collect, render

if TYPE_CHECKING:
    from engine.controller.loop import Controller

# However many look, the page is made once in this time at most, and takes a tenth of one core at most.
FRESH_S, IDLE_SHARE = 1.0, 10


class LivePage:
    """The page of one controller. Safe to use from several threads."""

    def __init__(self, controller: "Controller"):
        self._controller = controller
        self._lock = threading.Lock()
        self._html = ""
        self._until = 0.0

    def html(self) -> str:
        """Return the page, a second old at most while it is made quickly."""
        with self._lock:
            started = time.monotonic()
            if started >= self._until:
                self._html = render(page_data(self._controller), live=True)
                ended = time.monotonic()
                self._until = ended + max(FRESH_S, IDLE_SHARE * (ended - started))
            return self._html


def page_data(controller: "Controller") -> ReportData:
    """Gather what the page shows as of now; before the first snapshot it says that there is none."""
    params, catalog, now = controller.params, controller.catalog, time.time()
    alarms = [f"{part}: {fault}" for part, fault in list(controller.faults.items())]
    if controller.decisions.frozen():
        alarms.append("Releases are frozen: no pointer moves but rollbacks, until `graftwork thaw`.")
    links = {
        "MLflow": params.url("mlflow"),
        "Prefect": params.url("prefect"),
        "Health": "/health",
        "Metrics": "/metrics",
        "Interface": "/docs",
    }
    names = sorted(route.policy for route in catalog.routes.latest(MAX_POLICIES))
    try:
        return collect(
            params.paths.ledger_snapshot,
            catalog,
            names,
            title="Graftwork",
            created_at=now,
            links=links,
            revisions_dir=params.paths.revisions,
            alarms=alarms,
        )
    except NotFound as error:
        return ReportData("Graftwork", now, links=tuple(links.items()), alarms=(*alarms, str(error)))
