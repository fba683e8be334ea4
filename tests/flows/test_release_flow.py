"""The flow `release` is killed after each of its steps: the controller goes on, and nothing is lost."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from prefect.client.schemas.objects import FlowRunInput

from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry
from engine.settings.forms import ApprovalForm, ReleaseForm, RunningForm
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.settings.releases import ReleaseConfig
from flows import decide, demo
from flows import release as flow
from tasks import approval, progress, release, steps
from tests.helpers.canary_users import Users
from tests.helpers.live import eventually
from tests.helpers.rows import NEW, OLD, THIRD, fill

STEPS = 7


class Killed(BaseException):
    """Stands for kill -9: nothing in the product catches it."""


@pytest.fixture
def params(tmp_path: Path) -> Params:
    settings = ReleaseConfig(min_units=10, max_s=60)
    return Params(state_dir=tmp_path / "state", release=settings)


@pytest.fixture
def controller(params: Params) -> Iterator[Controller]:
    migrate(params.paths.catalog_url)
    fill(whole_catalog(params.paths.catalog_url))
    controller = Controller(params, "test")
    turning = threading.Thread(target=controller.run)
    turning.start()
    yield controller
    controller.stop()
    turning.join()
    controller.close()


def numbered(step: Callable[..., Any], countdown: Iterator[int], last: int | None) -> Callable[..., Any]:
    """Return a step after which the flow's process is killed, if it is the last."""

    def run(*given: Any, **named: Any) -> Any:
        result = step(*given, **named)
        if next(countdown) == last:
            raise Killed
        return result

    return run


@pytest.fixture
def run(
    params: Params, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int | None], int]:
    """Return a way to run the flow, killed after its n-th step; it returns how many steps were begun."""
    key = controller.catalog.keys.ensure_local(params.paths.local_key)
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(httpx.Client()))
    app, headers = whole_app(controller, mirror), {"Authorization": f"Bearer {key}"}

    def client(_: Params) -> ControllerClient:
        found = ControllerClient("http://controller", key)
        found.http = TestClient(app, headers=headers)
        return found

    monkeypatch.setattr(release, "controller", client)
    monkeypatch.setattr(approval, "controller", client)
    monkeypatch.setattr(flow, "flow_settings", lambda: params)
    monkeypatch.setattr(progress, "show_table", lambda *_: None)

    def run(last: int | None) -> int:
        countdown = itertools.count(1)
        plain = {
            "start_release": steps.start_release.fn,
            "wait_for_verdict": steps.wait_for_verdict.fn,
            "update_page": lambda *_: None,
        }
        monkeypatch.setattr(
            flow,
            "steps",
            SimpleNamespace(**{name: numbered(one, countdown, last) for name, one in plain.items()}),
        )
        for name in ("tag_run", "show_link", "show_table"):
            monkeypatch.setattr(flow, name, numbered(lambda *_: None, countdown, last))
        monkeypatch.setattr(flow, "ask_for_approvals", numbered(approval.ask_for_approvals, countdown, last))
        with suppress(Killed):
            flow.release.fn(
                ReleaseForm(policy="sorting", digest=NEW, skip_score="It has no suite.", approval_s=3600)
            )
        return next(countdown) - 1

    return run


@pytest.mark.parametrize("last", range(1, STEPS + 1))
def test_a_flow_that_is_killed_changes_nothing(
    params: Params, controller: Controller, run: Callable[[int | None], int], last: int
) -> None:
    catalog, users = whole_catalog(params.paths.catalog_url), Users(params)

    def answer() -> None:
        """Approve the release, and have users reject its canary."""
        assert eventually(lambda: any(one.step == "approval" for one in catalog.releases.all()))
        with controller.decisions.lock:
            controller.decisions.approve(catalog.releases.all()[0].id, "ann", "It looks right.")
        assert eventually(lambda: catalog.routes.get("sorting").canary == NEW)
        users.crowd(canary=0.0, baseline=1.0, pairs=8)

    people = threading.Thread(target=answer)
    people.start()
    assert run(last) == last
    people.join()
    assert eventually(lambda: not catalog.releases.all(open_only=True))
    (ended,) = catalog.releases.all()
    assert (ended.state, ended.approved["by"]) == ("rolled_back", "ann")
    assert catalog.tombstones.find("sorting", NEW) is not None
    assert catalog.routes.get("sorting").champion == OLD
    catalog.close()


def test_the_flow_has_no_more_steps_than_those(
    params: Params, controller: Controller, run: Callable[[int | None], int]
) -> None:
    def hold() -> None:
        with whole_catalog(params.paths.catalog_url) as catalog:
            assert eventually(lambda: catalog.releases.all())
            with controller.decisions.lock:
                controller.decisions.hold(catalog.releases.all()[0].id, "ann", "Enough.")

    person = threading.Thread(target=hold)
    person.start()
    assert run(None) == STEPS
    person.join()


@pytest.mark.usefixtures("run")
def test_the_form_of_each_approval_has_a_key_of_its_own(
    params: Params, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[str] = []
    keys: list[str] = []

    def suspend(wait_for_input: type[ApprovalForm], timeout: int, key: str) -> ApprovalForm:
        keys.append(key)
        # Prefect keeps the form under a key with this one in it, and refuses dots.
        FlowRunInput(flow_run_id=uuid.uuid4(), key=f"suspended-{key}-schema", value="{}")
        return wait_for_input(approve=len(keys) < 3, by="ada", reason=f"Look {len(keys)}.")

    monkeypatch.setattr("prefect.flow_runs.suspend_flow_run", suspend)
    monkeypatch.setattr("prefect.runtime.deployment.id", "its deployment", raising=False)
    monkeypatch.setattr(progress, "show_table", lambda rows, key, says: tables.append(rows[0]["gate"]))
    settings = {
        "ramp": (0.1, 0.15), "step_s": 0.1, "approval_s": 3600, "approval_weights": (0.15, 0.2),
    }  # fmt: skip
    with controller.decisions.lock:
        started = controller.decisions.start("sorting", NEW, settings, {"score": "It has no suite."}, "me")
    approval.ask_for_approvals(params, asdict(started))
    assert keys == ["approval", "approval-1", "approval-2"]
    assert [one for one in tables if "approval" in one] == [
        "approval of 10%", "approval of 15%", "approval of 20%",
    ]  # fmt: skip
    ended = controller.catalog.releases.get(started.id)
    assert (ended.state, ended.reason, ended.approved["reason"]) == ("held", "Look 3.", "Look 1.")
    assert [one.get("reason") for one in ended.approvals] == ["Look 2.", None]


@pytest.mark.usefixtures("run")
def test_a_running_release_is_paused_resumed_and_held_by_flows(
    params: Params, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []
    plain = {"decide": steps.decide.fn, "update_page": lambda _params, _policy, digest: pages.append(digest)}
    monkeypatch.setattr(decide, "steps", SimpleNamespace(**plain))
    monkeypatch.setattr(decide, "flow_settings", lambda: params)
    for name in ("tag_run", "show_table"):
        monkeypatch.setattr(decide, name, lambda *_: None)
    with controller.decisions.lock:
        controller.decisions.start("sorting", NEW, {"approval_s": 3600}, {"score": "It has no suite."}, "me")
    form = RunningForm(policy="sorting", by="ann", reason="Lunch.")
    assert decide.pause.fn(form)["paused"]["by"] == "ann"
    assert decide.resume.fn(form)["paused"] is None
    assert decide.hold.fn(form)["state"] == "held"
    assert pages == [NEW] * 3


def test_the_main_job_follows_a_release_that_ends_before_it_can_ask_for_it(
    params: Params,
    controller: Controller,
    run: Callable[[int | None], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(1)
    [left] = controller.catalog.releases.all("sorting", open_only=True)

    @contextmanager
    def ending(*_: Any) -> Iterator[SimpleNamespace]:
        for running in controller.catalog.releases.all("sorting", open_only=True):
            controller.decisions.hold(running.id, "a user", "Its evidence was nearly whole.")
        yield SimpleNamespace(refuse_unanswered=lambda: None, answered=["an answer"])

    monkeypatch.setattr(demo, "users", ending)
    monkeypatch.setattr(demo, "controller", release.controller)
    given = params.model_copy(
        update={"policies": {"sorting": PolicyConfig(task="sorting", suite="sorting-json")}}
    )
    found: Any = SimpleNamespace(policy="sorting", digest=NEW)
    ended, answered = demo.release_to_users(given, found, 1, demo.left_running(given)["sorting"], after_s=0.0)
    assert (ended["id"], ended["state"], answered) == (left.id, "held", ["an answer"])
    # There may be none, or one of another revision, which the form replaces.
    assert demo.left_running(given) == {}
    run(1)
    other = demo.left_running(given)["sorting"]
    monkeypatch.setattr(demo, "release", lambda form: form)
    found.digest = THIRD
    form: Any = demo.release_to_users(given, found, 1, other, after_s=0.0)[0]
    assert (form.digest, form.if_running) == (THIRD, "replace")
