"""Holds a release whose flow run a person cancelled in Prefect.

Prefect's server is polled, since a suspended run is cancelled without any hook. A run that crashed or was
killed is no Cancel: its release goes on.
"""

import logging

import httpx

from engine.catalog.catalog import Catalog
from engine.controller.release_decisions import ReleaseDecisions
from engine.errors import GraftworkError
from engine.settings.forms import RELEASE_TAG
from engine.threads import PeriodicThread

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
BY = "prefect"
CANCELLED = ("CANCELLING", "CANCELLED")
log = logging.getLogger(__name__)


class CancelledRuns(PeriodicThread):
    """Polls for cancelled runs while releases run; `client` has the URL of Prefect's server as base.

    Prefect knows no user, so a Cancel is made in the name "prefect".
    """

    def __init__(self, catalog: Catalog, decisions: ReleaseDecisions, client: httpx.Client):
        super().__init__("cancelled-runs", INTERVAL_S, self.look)
        self._catalog = catalog
        self._decisions = decisions
        self._client = client

    def look(self) -> None:
        """Hold the running releases whose flow run was cancelled; raises `httpx.HTTPError`."""
        running = {
            f"{RELEASE_TAG}{release.id}": release for release in self._catalog.releases.all(open_only=True)
        }
        if not running:
            return
        wanted = {"state": {"type": {"any_": CANCELLED}}, "tags": {"any_": list(running)}}
        body = {"flow_runs": wanted, "limit": 200}
        answer = self._client.post("/api/flow_runs/filter", json=body, timeout=TIMEOUT_S)
        for run in answer.raise_for_status().json():
            for tag in set(run["tags"]) & set(running):
                self._hold(running[tag].id, f"The flow run {run['name']!r} was cancelled in Prefect.")

    def _hold(self, release_id: str, reason: str) -> None:
        try:
            self._decisions.hold(release_id, BY, reason)
        except GraftworkError as error:
            # Refused while releases are frozen; one release must not block the others.
            log.info("Release %s was cancelled in Prefect, and is not held: %s", release_id, error)
