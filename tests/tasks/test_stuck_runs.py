"""Runs whose worker died: found, ended, and told from those that may still begin; and whom they kept out."""

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from engine.catalog.catalog import migrate
from engine.errors import ServiceError
from engine.services import lifecycle
from engine.services.lifecycle import State
from engine.settings.params import Params
from flows.cli import app, command, serve
from tasks import doctor, look, stuck_runs
from tasks.exposure import PATHS
from tests.helpers.live import free_port
from tests.helpers.own_ports import own_ports

NIGHTLY, ADAPT = "id-of-nightly", "id-of-adapt"
POOL, MINUTE, HOUR, DAY = "graftwork", 60, 3600, 86_400
TAKEN = "Deployment concurrency limit reached."


class Prefect:
    """Prefect's API, as far as it is asked here, with a deployment of one slot and another without limit."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.workers: list[str] = []
        self.refuses = 200
        self.busy = 0

    def add(self, id: str, state: str, age_s: float, deployment: str = NIGHTLY, message: str = "") -> None:
        at = datetime.fromtimestamp(time.time() - age_s, UTC).isoformat().replace("+00:00", "Z")
        told = {"type": state, "timestamp": at, "message": message or None}
        self.runs[id] = {
            "id": id, "name": f"name-of-{id}", "deployment_id": deployment,
            "state_type": state, "state": told,
        }  # fmt: skip

    def client(self, *_: Any) -> httpx.Client:
        return httpx.Client(base_url="http://prefect", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if self.busy:
            self.busy -= 1
            return httpx.Response(503, text="It is busy.")
        if self.refuses != 200:
            return httpx.Response(self.refuses, text="It is busy.")
        if moved := re.fullmatch(r"/api/flow_runs/(.*)/set_state", request.url.path):
            return httpx.Response(201, json=self._set(moved[1], body))
        asked = {
            "/api/deployments/filter": lambda: self._deployments(body["work_pools"]["name"]["any_"]),
            "/api/flow_runs/filter": lambda: self._filter(body["flow_runs"]),
            f"/api/work_pools/{POOL}/workers/filter": lambda: [{"status": one} for one in self.workers],
        }
        return httpx.Response(200, json=asked[request.url.path]())

    def _deployments(self, pools: list[str]) -> list[dict[str, Any]]:
        limit = {"limit": 1, "active_slots": 1}
        rows = [("nightly", NIGHTLY, limit), ("adapt", ADAPT, None)]
        known = [{"name": name, "id": id, "global_concurrency_limit": most} for name, id, most in rows]
        return known if pools == [POOL] else []

    def _filter(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        after = wanted.get("end_time", {}).get("after_", "1970-01-01T00:00:00Z")
        return [
            run
            for run in self.runs.values()
            if run["state_type"] in wanted["state"]["type"]["any_"]
            and run["deployment_id"] in wanted["deployment_id"]["any_"]
            and datetime.fromisoformat(run["state"]["timestamp"]) >= datetime.fromisoformat(after)
        ]

    def _set(self, id: str, body: dict[str, Any]) -> dict[str, Any]:
        # With force Prefect does not give the slot back.
        assert not body["force"]
        if self.runs[id]["state_type"] == "COMPLETED":
            return {"status": "ABORT"}
        self.runs[id] |= {"state_type": body["state"]["type"], "state": body["state"]}
        return {"status": "ACCEPT"}


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    made = Prefect()
    for module in (stuck_runs, doctor, look):
        monkeypatch.setattr(module, "open_prefect", made.client)
    return made


@pytest.fixture
def params(tmp_path: Path) -> Params:
    return own_ports(state_dir=tmp_path / "state")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The settings file of an installation with ports of its own."""
    ports = "".join(f"{name}: {{port: {free_port()}}}\n" for name in PATHS)
    (tmp_path / "params.yaml").write_text(f"state_dir: {tmp_path}/state\n{ports}")
    return tmp_path / "params.yaml"


def found(prefect: Prefect, started_ago_s: float | None = None) -> list[str]:
    now = time.time()
    started = None if started_ago_s is None else now - started_ago_s
    return [run.id for run in stuck_runs.stuck_runs(prefect.client(), now, started)]


def test_what_was_claimed_before_the_worker_started_is_dead(prefect: Prefect) -> None:
    prefect.workers = ["ONLINE"]
    prefect.add("before", "PENDING", 30)
    prefect.add("since", "PENDING", 5, ADAPT)
    assert found(prefect, started_ago_s=20) == ["before"]
    assert found(prefect, started_ago_s=40) == []


@pytest.mark.parametrize(
    ("workers", "age_s", "dead"),
    [
        ([], 4 * MINUTE, False),
        ([], 6 * MINUTE, True),
        (["OFFLINE"], 6 * MINUTE, True),
        (["OFFLINE", "ONLINE"], 6 * MINUTE, False),
        (["ONLINE"], 2 * HOUR, True),
    ],
)
def test_age_decides_where_the_workers_start_is_not_known(
    prefect: Prefect, workers: list[str], age_s: float, dead: bool
) -> None:
    prefect.workers = workers
    prefect.add("run", "PENDING", age_s)
    assert found(prefect) == (["run"] if dead else [])


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELLING"])
def test_a_run_without_the_slot_does_not_take_it_from_the_one_that_has_it(
    prefect: Prefect, state: str
) -> None:
    """The end of a run gives a slot back, whether it is its own or not."""
    for deployment in (NIGHTLY, ADAPT):
        prefect.add(f"dead {deployment}", "PENDING", HOUR, deployment)
        prefect.add(f"alive {deployment}", state, MINUTE, deployment)
    assert found(prefect) == [f"dead {ADAPT}"]


def test_a_dead_run_is_ended_and_says_why(prefect: Prefect, params: Params) -> None:
    prefect.add("dead", "PENDING", 3 * HOUR)
    (ended,) = stuck_runs.free_stuck(params, time.time(), started=time.time())
    assert (ended.name, ended.deployment) == ("name-of-dead", "nightly")
    run = prefect.runs["dead"]
    assert run["state_type"] == "CRASHED"
    assert "3h ago" in run["state"]["message"]
    assert "worker" in run["state"]["message"]
    assert stuck_runs.free_stuck(params, time.time(), started=time.time()) == []


def test_a_busy_server_is_asked_again(prefect: Prefect, params: Params) -> None:
    prefect.add("dead", "PENDING", HOUR)
    prefect.busy = 1
    assert [run.id for run in stuck_runs.free_stuck(params, time.time(), started=time.time())] == ["dead"]


@pytest.mark.parametrize("status", [401, 503])
def test_a_refusal_is_an_error_with_the_fix(
    prefect: Prefect, params: Params, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(stuck_runs, "PATIENCE_S", 0.1)
    prefect.refuses = status
    with pytest.raises(ServiceError, match=rf"{status}.*graftwork up"):
        stuck_runs.free_stuck(params, time.time(), None)


def test_up_ends_the_runs_of_the_worker_before(
    prefect: Prefect, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect.add("dead", "PENDING", HOUR)
    prefect.add("young", "PENDING", 1, ADAPT)
    monkeypatch.setattr(lifecycle, "up", lambda *_: True)
    monkeypatch.setattr(command, "install", lambda _: 9)
    monkeypatch.setattr(lifecycle, "status", lambda _: [State(lifecycle.WORKER, "", "running", 1, 20)])
    said = CliRunner().invoke(app, ["up", "--params", str(file)])
    assert said.exit_code == 0, said.output
    assert {id: run["state_type"] for id, run in prefect.runs.items()} == {
        "dead": "CRASHED",
        "young": "PENDING",
    }


def test_a_worker_in_the_foreground_ends_what_the_one_before_it_claimed(
    prefect: Prefect, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect.add("dead", "PENDING", 1)
    prefect.workers = ["ONLINE"]
    monkeypatch.setattr(serve, "install", lambda _: 9)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    said = CliRunner().invoke(app, ["start", "worker", "--params", str(file)])
    assert "name-of-dead" in said.output
    assert prefect.runs["dead"]["state_type"] == "CRASHED"


def test_doctor_names_run_deployment_and_age_and_changes_nothing(
    prefect: Prefect, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "status", lambda _: [State("prefect", "", "running", None, 9)])
    assert [one for one in doctor.examine(params) if one.check == "runs"] == [
        doctor.Finding("runs", "in order")
    ]
    prefect.add("dead", "PENDING", 3 * HOUR)
    (one,) = [one for one in doctor.examine(params) if one.check == "runs"]
    assert all(word in one.seen for word in ("name-of-dead", "nightly", "3h"))
    assert "graftwork up" in one.advice
    assert prefect.runs["dead"]["state_type"] == "PENDING"


def test_status_tells_which_runs_found_no_slot(prefect: Prefect, params: Params) -> None:
    prefect.add("first", "CANCELLED", 3 * DAY, message=TAKEN)
    prefect.add("last", "CANCELLED", 2 * DAY, message=TAKEN)
    prefect.add("long ago", "CANCELLED", 8 * DAY, message=TAKEN)
    prefect.add("by a person", "CANCELLED", DAY, message="Enough.")
    prefect.add("without a word", "CANCELLED", DAY)
    migrate(params.paths.catalog_url)
    (told,) = look.standing(params)["cancelled"]
    assert (told["deployment"], told["runs"]) == ("nightly", 2)
    assert told["last_at"] == pytest.approx(time.time() - 2 * DAY, abs=60)


def test_status_prints_it(prefect: Prefect, file: Path, tmp_path: Path) -> None:
    migrate(own_ports(state_dir=tmp_path / "state").paths.catalog_url)
    prefect.add("one", "CANCELLED", DAY, message=TAKEN)
    said = CliRunner().invoke(app, ["status", "--params", str(file)])
    (line,) = [line for line in said.output.splitlines() if "nightly" in line]
    assert "1 run was" in line
    # As the server says it: an hour may end meanwhile.
    at = datetime.fromisoformat(prefect.runs["one"]["state"]["timestamp"])
    assert at.strftime("%Y-%m-%d %H") in line


def test_status_does_without_prefect(prefect: Prefect, params: Params) -> None:
    prefect.refuses = 401
    assert look.lately_cancelled(params) == []
