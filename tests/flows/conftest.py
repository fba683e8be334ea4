"""One `graftwork up` for all files of SHARED["people"], and what people have made on it."""

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine.catalog.records import served_name
from tests.helpers.live import eventually, left_behind
from tests.helpers.main_job import run_job, short_policies, usual_seconds
from tests.helpers.operated import POLICY, QUICKSTART, Operated, graftwork, write_settings
from tests.helpers.repository import ROOT


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    state = tmp_path_factory.mktemp("operated")
    # Not while the tests run. How good a few steps are is the CPU's rounding, so any score passes; how many
    # users a canary would have is the machine's speed, so it has a day.
    far = f"0 {(time.gmtime().tm_hour + 12) % 24} * * *"
    release = {"score_margin": 1.0, "max_s": 86400}
    settings = write_settings(state, policies=short_policies(), nightly={"cron": far}, release=release)
    shutil.copytree(ROOT / "eval_suites", state / "suites")
    try:
        # In a fresh clone it builds the base, beside other workers.
        started = graftwork("up", settings=settings, timeout=900)
        assert started.returncode == 0, started.stdout + started.stderr
        yield Operated(settings, state)
    finally:
        stopped = graftwork("down", settings=settings)
    assert stopped.returncode == 0, stopped.stderr
    assert not left_behind(state)


@pytest.fixture(scope="session")
def finished(people: Operated) -> dict[str, Any]:
    """The summary of the main job, which leaves a champion of `arithmetic` and of `sorting`."""
    run_job(people.settings)
    summary = json.loads((people.state / "runs" / "latest.json").read_text())
    # The controller writes a snapshot every two seconds while the ledger hears of something.
    snapshot = people.paths.ledger_snapshot
    assert eventually(lambda: time.time() - snapshot.stat().st_mtime > 6, 60)
    return summary


@pytest.fixture(scope="session")
def dead(people: Operated) -> str:
    """A run whose process was killed after its first heartbeat; it is marked minutes later."""
    at = f"/deployments/{people.deployment('report')['id']}/create_flow_run"
    body = {"parameters": {"form": {}}, "state": {"type": "SCHEDULED", "name": "Later"}}
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400))
    body["state"]["state_details"] = {"scheduled_time": later}
    run = people.prefect.post(at, json=body).raise_for_status().json()["id"]
    for kind in ("PENDING", "RUNNING"):
        moved = people.prefect.post(
            f"/flow_runs/{run}/set_state", json={"state": {"type": kind}, "force": True}
        )
        moved.raise_for_status()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    beat = {
        "id": str(uuid.uuid4()),
        "occurred": now,
        "event": "prefect.flow-run.heartbeat",
        "resource": resource,
    }
    people.prefect.post("/events", json=[beat | {"related": [], "payload": {}}]).raise_for_status()
    return run


@pytest.fixture(scope="session")
def quickstart(people: Operated, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The policy that docs/quickstart.md makes: its own data, trained, and released to users."""
    people.page(QUICKSTART, tmp_path_factory.mktemp("quickstart"))
    return POLICY


@dataclass(frozen=True)
class Second:
    """A second revision of the quickstart's policy: its training run, version in MLflow and name."""

    run: str
    version: str
    name: str


@pytest.fixture(scope="session")
def second(people: Operated, quickstart: str) -> Second:
    """Train it from the form."""
    trained = people.run("adapt", policy=quickstart, steps=2, seed=9, scored=False)
    versions = people.mlflow.search_model_versions(f"name = '{quickstart}'")
    newest = max(versions, key=lambda one: int(one.version))
    return Second(trained, str(newest.version), served_name(quickstart, newest.tags["graftwork.digest"]))


@pytest.fixture(scope="module")
def usual_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The seconds of a whole main job, of whose tenths the files of interrupts take a moment each."""
    return usual_seconds(tmp_path_factory.mktemp("whole"))
