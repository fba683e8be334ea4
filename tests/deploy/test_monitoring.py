"""Alerts and dashboard: Prometheus takes them, they fire, and each metric in them is one that is told."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.catalog.catalog import migrate
from engine.controller.__main__ import whole_app, work_beside
from engine.controller.release_loop import Controller
from engine.security.credentials import credential
from engine.serving.gateway.routing import Router
from engine.settings.params import Params
from engine.state_metrics import StateMetrics
from engine.threads import Work
from engine.training.service.metrics import TrainerMetrics
from engine.training.service.queue import Queue
from engine.work_metrics import WorkMetrics
from tests.helpers.repository import ROOT

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "graftwork.json"
# What PromQL adds to the names of counters and histograms.
SUFFIXES = ("_bucket", "_sum", "_count")
NAME = re.compile(r"\b(?:graftwork_|vllm:)\w+")
# Series of each alert that make it fire, and that leave it silent, by a sample a minute.
QUIET = {
    'graftwork_answers_total{status="200",reason=""}': "0+600x60",
    "graftwork_catalog_unread_seconds": "0x60",
    "graftwork_alarms": "0x60",
    "graftwork_ingest_age_seconds": "1x60",
    "graftwork_ledger_bytes": "1000000x60",
    "graftwork_snapshot_age_seconds": "20x60",
    "graftwork_spool_age_seconds": "1x60",
    "graftwork_spool_rejected_files": "0x60",
    "graftwork_observations_lost_total": "0x60",
    "graftwork_usage_unsettled_total": "0x60",
    'graftwork_background_age_seconds{work="usage-sync"}': "0x60",
    'graftwork_background_errors_total{work="usage-sync"}': "0x60",
    "graftwork_notifications_unsent": "0x60",
    "graftwork_backup_age_seconds": "3600x60",
    "graftwork_nightly_missed": "0x60",
    "graftwork_disk_free_bytes": "50000000000x60",
    'graftwork_requests_limited_total{tenant="acme",limit="concurrency"}': "0+60x60",
}
FIRES = {
    "GraftworkCatalogUnread": {"graftwork_catalog_unread_seconds": "10x60"},
    "GraftworkNoEngineAnswers": {'graftwork_answers_total{status="503",reason="unavailable"}': "0+900x60"},
    "GraftworkFaults": {'graftwork_answers_total{status="500",reason=""}': "0+30x60"},
    "GraftworkTenantLimited": {
        'graftwork_requests_limited_total{tenant="acme",limit="concurrency"}': "0+900x60"
    },
    "GraftworkAlarm": {"graftwork_alarms": "1x60"},
    "GraftworkControllerStands": {"graftwork_ingest_age_seconds": "0+60x60"},
    "GraftworkLedgerLarge": {"graftwork_ledger_bytes": "30000000000x60"},
    "GraftworkSnapshotOld": {"graftwork_snapshot_age_seconds": "0+60x60"},
    "GraftworkEventsWait": {"graftwork_spool_age_seconds": "0+60x60"},
    "GraftworkEventsRejected": {"graftwork_spool_rejected_files": "1x60"},
    "GraftworkObservationsLost": {"graftwork_observations_lost_total": "0+1x60"},
    "GraftworkUsageNotWritten": {'graftwork_background_age_seconds{work="usage-sync"}': "0+60x60"},
    "GraftworkWorkFails": {
        'graftwork_background_age_seconds{work="spool-gateway"}': "0+60x60",
        'graftwork_background_errors_total{work="spool-gateway"}': "0+100x60",
    },
    "GraftworkNotificationsWait": {"graftwork_notifications_unsent": "3x60"},
    "GraftworkNightlyMissed": {"graftwork_nightly_missed": "1x60"},
    "GraftworkBackupOld": {"graftwork_backup_age_seconds": "200000x60"},
    "GraftworkDiskFull": {"graftwork_disk_free_bytes": "1000000000x60"},
}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def expressions() -> Iterator[str]:
    """Yield the PromQL of the alerts, then that of the dashboard."""
    for rule in rules():
        yield rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


@pytest.fixture
def told(tmp_path: Path) -> Iterator[set[str]]:
    """The names of the metrics that our processes tell."""
    from engine.serving.gateway import call, forwarding, gateway, meter
    from engine.serving.residency.load_metrics import LoadMetrics

    assert all((call, forwarding, gateway, meter))
    params = Params(state_dir=tmp_path / "state")
    migrate(params.paths.catalog_url)
    controller = Controller(params, "test")
    controller.tick()
    controller.catalog.note("backup", "somewhere", {})
    registry, work = CollectorRegistry(), Work("some")
    LoadMetrics(registry)
    WorkMetrics(registry)
    StateMetrics(registry, params.paths)
    beside = work_beside(controller)
    app = whole_app(controller, Mock(fault=None))
    headers = {"authorization": f"Bearer {credential(params.paths, 'controller')}"}
    text = TestClient(app, headers=headers).get("/metrics").text
    trainer = TrainerMetrics().render([], Queue(1, 1, list, list)).decode()  # type: ignore[arg-type]
    found = [*text_string_to_metric_families(text), *text_string_to_metric_families(trainer)]
    yield {name for one in [*found, *registry.collect(), *REGISTRY.collect()] for name in names_of(one)}
    for one in (work, *(thread.work for thread in beside)):
        one.end()
    controller.close()


def names_of(metric: Metric) -> Iterator[str]:
    yield metric.name
    if metric.type == "counter":
        yield f"{metric.name}_total"


def test_each_metric_of_alerts_and_dashboard_is_told(told: set[str]) -> None:
    # The engine's endpoint makes this one, when its catalog is open.
    told |= {"graftwork_catalog_unread_seconds"}
    assert Router.unread_s
    wanted = {name for text in expressions() for name in NAME.findall(text)}
    ours = {name for name in wanted if name.startswith("graftwork_")}
    assert len(ours) > 20
    bare = {next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name) for name in ours}
    assert bare - told == set()


def test_each_metric_of_vllm_is_one_of_its_own() -> None:
    import vllm

    source = (Path(vllm.__file__).parent / "v1" / "metrics" / "loggers.py").read_text()
    wanted = {name for text in expressions() for name in NAME.findall(text) if name.startswith("vllm:")}
    bare = {next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name) for name in wanted}
    assert bare
    assert {name for name in bare if f'"{name}"' not in source} == set()


def test_each_alert_says_what_to_do() -> None:
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}
        assert rule["annotations"]["summary"].endswith(".")


@pytest.mark.services
def test_prometheus_takes_alerts_and_dashboard(promtool: str, tmp_path: Path) -> None:
    drawn = [{"record": f"drawn:number{number}", "expr": text} for number, text in enumerate(expressions())]
    dashboard = tmp_path / "dashboard.yml"
    dashboard.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": drawn}]}))
    said = checked(promtool, "check", str(RULES), str(dashboard))
    assert "error" not in said.lower(), said


@pytest.mark.services
def test_each_alert_fires_for_its_reason_alone(promtool: str, tmp_path: Path) -> None:
    assert {rule["alert"] for rule in rules()} == FIRES.keys()
    cases = [({}, set()), *((series, {name}) for name, series in FIRES.items())]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": text} for name, text in (QUIET | series).items()],
            "alert_rule_test": [
                {
                    "eval_time": "40m",
                    "alertname": rule["alert"],
                    "exp_alerts": [fired(rule, series)] if rule["alert"] in expected else [],
                }
                for rule in rules()
            ],
        }
        for series, expected in cases
    ]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    checked(promtool, "test", str(file))


def checked(promtool: str, what: str, *files: str) -> str:
    """Return what promtool says of rules that it takes."""
    command = [promtool, what, "rules", *files]
    check = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert check.returncode == 0, (check.stdout + check.stderr)[-4000:]
    return check.stdout + check.stderr


def fired(rule: dict[str, Any], series: dict[str, str]) -> dict[str, Any]:
    """Return an alert as it fires: with the labels that its expression keeps."""
    kept = {"GraftworkTenantLimited": {"tenant"}, "GraftworkNoEngineAnswers": set(), "GraftworkFaults": set()}
    labels = dict(re.findall(r'(\w+)="([^"]*)"', next(iter(series))))
    if (only := kept.get(rule["alert"])) is not None:
        labels = {name: value for name, value in labels.items() if name in only}
    return {"exp_labels": labels | rule["labels"], "exp_annotations": rule["annotations"]}
