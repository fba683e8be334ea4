"""Report a run: ledger -> HTML report that opens offline, and a link to it in the Prefect UI."""

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_link_artifact

from engine.config import Params
from tasks.steps import write_report


@flow(name="report")
def report(params: Params, since: float = 0.0, stages: Mapping[str, float] | None = None) -> Path:
    """Write everything that the ledger holds from `since` on as one HTML file; return its path."""
    now = time.time()
    path = params.paths.runs / f"report-{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}.html"
    write_report(params, path, since, now, stages or {})
    create_link_artifact(path.as_uri(), path.name, "report")
    return path
