"""A Cancel in Prefect holds the run's release; nothing else that happens to a run does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.catalog.catalog import Catalog, Release, migrate
from engine.controller.release_loop import Controller
from engine.integrations.cancelled_runs import CancelledRuns
from engine.settings.params import Params
from tests.helpers.rows import NEW, OLD, fill


class Prefect:
    """Prefect's server with its flow runs, at the boundary."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.asked, self.down = 0, False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.down:
            raise httpx.ConnectError("Nobody listens there.")
        assert request.url.path == "/api/flow_runs/filter"
        wanted = json.loads(request.content)["flow_runs"]
        states, tags = set(wanted["state"]["type"]["any_"]), set(wanted["tags"]["any_"])
        found = [run for run in self.runs if run["state"] in states and tags & set(run["tags"])]
        return httpx.Response(200, json=found)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    params = Params(state_dir=tmp_path / "state")
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = Controller(params, "test")
    yield controller
    controller.close()


@pytest.fixture
def prefect() -> Prefect:
    return Prefect()


@pytest.fixture
def runs(controller: Controller, prefect: Prefect) -> CancelledRuns:
    client = httpx.Client(base_url="http://prefect", transport=httpx.MockTransport(prefect))
    return CancelledRuns(controller.catalog, controller.decisions, client)


def start(controller: Controller, prefect: Prefect, state: str) -> Release:
    release = controller.decisions.start("sorting", NEW, {}, {"score": "not scored here"}, "me")
    controller.tick()
    tags = ["policy:sorting", f"release:{release.id}"]
    prefect.runs = [{"name": "wise-owl", "state": state, "tags": tags}]
    return release


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_a_cancelled_run_holds_its_release(
    controller: Controller, prefect: Prefect, runs: CancelledRuns, state: str
) -> None:
    release = start(controller, prefect, state)
    assert controller.catalog.routes.get("sorting").canary == NEW
    for _ in range(2):
        runs.look()
    ended = controller.catalog.releases.get(release.id)
    assert (ended.state, ended.approval) == ("held", "prefect")
    assert ended.reason == "The flow run 'wise-owl' was cancelled in Prefect."
    route = controller.catalog.routes.get("sorting")
    assert (route.champion, route.canary) == (OLD, None)


@pytest.mark.parametrize("state", ["CRASHED", "FAILED", "PAUSED", "RUNNING", "COMPLETED"])
def test_a_run_that_was_not_cancelled_changes_nothing(
    controller: Controller, prefect: Prefect, runs: CancelledRuns, state: str
) -> None:
    release = start(controller, prefect, state)
    runs.look()
    assert controller.catalog.releases.get(release.id).state == "running"


def test_prefect_is_asked_only_while_a_release_runs_and_may_be_down(
    controller: Controller, prefect: Prefect, runs: CancelledRuns
) -> None:
    runs.look()
    assert prefect.asked == 0
    release = start(controller, prefect, "CANCELLED")
    prefect.down = True
    with pytest.raises(httpx.ConnectError):
        runs.look()
    assert controller.catalog.releases.get(release.id).state == "running"
    prefect.down = False
    runs.look()
    assert controller.catalog.releases.get(release.id).state == "held"


def test_a_cancel_during_a_freeze_waits_for_the_thaw(
    controller: Controller, prefect: Prefect, runs: CancelledRuns
) -> None:
    release = start(controller, prefect, "CANCELLED")
    controller.decisions.freeze("ann", "An audit.")
    runs.look()
    assert controller.catalog.releases.get(release.id).state == "running"
    controller.decisions.thaw("ann", "It is over.")
    runs.look()
    assert controller.catalog.releases.get(release.id).state == "held"
