"""Counts the nightly runs of the last day that did not complete, for a metric and its alert."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import httpx
from prometheus_client import CollectorRegistry, Gauge

from engine.threads import PeriodicThread

EVERY_S = 60.0
TIMEOUT_S = 5.0
DEPLOYMENT = "nightly"
LAST = timedelta(days=1)
# Cancelled for want of a slot, dead or failed; and one that no worker has begun in time.
MISSED = {"type": {"any_": ["CANCELLED", "CRASHED", "FAILED"]}}
LATE = {"name": {"any_": ["Late"]}}


class MissedRuns(PeriodicThread):
    """Asks Prefect's server once a minute; `client` has its URL as base, the metric is in `registry`."""

    def __init__(self, client: httpx.Client, registry: CollectorRegistry):
        super().__init__("missed-runs", EVERY_S, self.look)
        self._client = client
        self._gauge = Gauge(
            "graftwork_nightly_missed",
            "Nightly runs of the last day that did not complete.",
            registry=registry,
        )

    def look(self) -> None:
        """Set the gauge; raises `httpx.HTTPError`."""
        since = (datetime.now(UTC) - LAST).isoformat()
        # Some installations run no Prefect.
        with suppress(httpx.ConnectError):
            self._gauge.set(sum(self._count(state, since) for state in (MISSED, LATE)))

    def _count(self, state: dict[str, dict[str, list[str]]], since: str) -> int:
        body = {
            "deployments": {"name": {"any_": [DEPLOYMENT]}},
            "flow_runs": {"state": state, "expected_start_time": {"after_": since}},
        }
        answer = self._client.post("/api/flow_runs/count", json=body, timeout=TIMEOUT_S)
        return int(answer.raise_for_status().json())
