"""The flow `report`: an HTML report that opens offline, linked in Prefect."""

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from prefect import flow

from engine.settings.forms import ReportForm
from flows.entry import flow_settings
from tasks.progress import show_link
from tasks.steps import write_report


@flow(name="report")
def report(form: ReportForm) -> Path:
    """Write the report of the ledger as one HTML file; return its path."""
    now = time.time()
    since = now - form.since_s if form.since_s else 0.0
    return publish_report(since, now, {})


def publish_report(since: float, now: float, stages: Mapping[str, float]) -> Path:
    """Write the report of everything since `since` (epoch seconds) and link it in Prefect."""
    params = flow_settings()
    path = params.paths.runs / f"report-{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}.html"
    write_report(params, path, since, now, stages)
    # Browsers do not follow links from a web page to a file; the controller's page is the same report, live.
    show_link(f"{params.url('controller')}/", f"the live report; the file is {path}", "report")
    return path
