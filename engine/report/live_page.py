"""The controller's page: the current report with alarms; it refreshes itself while it is open.

It loads nothing from other servers.
"""

import threading
import time

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from engine.controller.alarms import alarms
from engine.controller.release_loop import Controller
from engine.errors import NotFound
from engine.report.pages import MAX_POLICIES, ReportData, collect, render

# The page is rendered once in this time at most, and takes at most a tenth of one core.
FRESH_S, IDLE_SHARE = 1.0, 10


def page_router(controller: Controller) -> APIRouter:
    """Return the route of a controller's page."""
    router, live = APIRouter(), LivePage(controller)

    @router.get("/", response_class=HTMLResponse)
    def page() -> str:
        return live.html()

    return router


class LivePage:
    """Renders and caches the page of one controller. Thread-safe."""

    def __init__(self, controller: Controller):
        self._controller = controller
        self._lock = threading.Lock()
        self._html = ""
        self._until = 0.0

    def html(self) -> str:
        """Return the page, at most a second old unless rendering is slow."""
        with self._lock:
            started = time.monotonic()
            if started >= self._until:
                self._html = render(page_data(self._controller), live=True)
                ended = time.monotonic()
                self._until = ended + max(FRESH_S, IDLE_SHARE * (ended - started))
            return self._html


def page_data(controller: Controller) -> ReportData:
    """Return what the page shows now; before the first snapshot, an alarm that there is none."""
    params, catalog, now = controller.params, controller.catalog, time.time()
    faults = [f"{part}: {fault}" for part, fault in alarms(controller).items()]
    if controller.decisions.frozen():
        faults.append(
            "Releases are frozen: promotions and canaries are blocked until `graftwork decide thaw`."
        )
    links = {
        "MLflow": params.url("mlflow"),
        "Prefect": params.url("prefect"),
        "Health": "/health",
        "Metrics": "/metrics",
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
            alarms=faults,
            latest=controller.latest.copy(),
        )
    except NotFound as error:
        return ReportData("Graftwork", now, links=tuple(links.items()), alarms=(*faults, str(error)))
