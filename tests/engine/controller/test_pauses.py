"""What stops a release without ending it: a person's pause, and the approval that a step waits for."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog, Release, migrate
from engine.clients.controller import ControllerClient
from engine.controller.__main__ import whole_controller
from engine.controller.evidence import EvidenceReader
from engine.controller.release_loop import Controller
from engine.errors import Conflict
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.engine.controller.test_release_decisions import given, told
from tests.helpers.canary_users import Users
from tests.helpers.command_line import graftwork
from tests.helpers.rows import NEW, OLD, fill

PERSON = {"by": "ada", "reason": "Lunch."}
REAL = time.time
NO_SCORE = {"score": "not scored here"}
PAUSED, RESUMED = {"by", "reason", "at"}, {"resumed_by", "resumed_for", "resumed_at"}


class Clock:
    """Seconds that both clocks, the steady one and the wall's, have gone on."""

    def __init__(self) -> None:
        self.seconds = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    began = REAL()
    monkeypatch.setattr(time, "time", lambda: began + clock.seconds)
    return clock


@pytest.fixture
def params(tmp_path: Path) -> Params:
    settings = ReleaseConfig(min_units=10, ramp=(0.1,), weight=0.5, step_s=50, max_s=100)
    return Params(state_dir=tmp_path / "state", release=settings)


@pytest.fixture
def controller(params: Params, clock: Clock) -> Iterator[Controller]:
    migrate(params.paths.catalog_url)
    with Catalog(params.paths.catalog_url) as catalog:
        fill(catalog)
    controller = whole_controller(params, "test")
    controller.reader = EvidenceReader(controller.catalog, lambda: clock.seconds)
    controller.tick()
    yield controller
    controller.close()


def begin(controller: Controller, **settings: object) -> Release:
    release = controller.decisions.start("sorting", NEW, settings, NO_SCORE, "me")
    controller.tick()
    return row(controller, release)


def row(controller: Controller, release: Release) -> Release:
    return controller.catalog.releases.get(release.id)


def after(controller: Controller, clock: Clock, seconds: float, is_restarted: bool = False) -> None:
    """Let time go by; a controller that is restarted knows of it by the rows alone."""
    controller.tick()
    clock.seconds += seconds
    if is_restarted:
        controller.reader = EvidenceReader(controller.catalog, lambda: clock.seconds)
    controller.tick()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_time_of_a_paused_release_stands(
    controller: Controller, clock: Clock, is_restarted: bool
) -> None:
    release = begin(controller)
    after(controller, clock, 30)
    controller.decisions.pause(release.id, **PERSON)
    after(controller, clock, 1000, is_restarted)
    paused = row(controller, release)
    assert (paused.state, paused.weight, paused.paused["by"]) == ("running", 0.1, "ada")
    assert controller.catalog.routes.get("sorting").weight == 0.1
    controller.decisions.resume(release.id, **PERSON)
    after(controller, clock, 19, is_restarted)
    assert row(controller, release).weight == 0.1
    after(controller, clock, 2, is_restarted)
    assert row(controller, release).weight == 0.5
    after(controller, clock, 48, is_restarted)
    assert row(controller, release).state == "running"
    after(controller, clock, 2, is_restarted)
    ended = row(controller, release)
    assert (ended.state, ended.reason[:10]) == ("held", "No verdict")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_approval_has_its_whole_time_after_a_pause(
    controller: Controller, clock: Clock, is_restarted: bool
) -> None:
    release = begin(controller, approval_s=100)
    after(controller, clock, 90)
    controller.decisions.pause(release.id, **PERSON)
    after(controller, clock, 1000, is_restarted)
    controller.decisions.resume(release.id, **PERSON)
    after(controller, clock, 9, is_restarted)
    assert row(controller, release).step == "approval"
    after(controller, clock, 2, is_restarted)
    assert "Nobody approved" in row(controller, release).reason


def test_a_pause_takes_evidence_and_blocks_no_rollback(controller: Controller, params: Params) -> None:
    release, users = begin(controller, ramp=[]), Users(params)
    controller.decisions.pause(release.id, **PERSON)
    users.crowd(canary=1.0, baseline=1.0, pairs=60)
    controller.tick()
    assert row(controller, release).state == "running"
    assert controller.latest[release.id].canary.is_clear
    users.crowd(canary=0.0, baseline=1.0, pairs=90)
    controller.tick()
    assert row(controller, release).state == "rolled_back"
    assert controller.catalog.routes.get("sorting").canary is None


def test_a_resumed_release_is_promoted_by_what_was_seen_meanwhile(
    controller: Controller, params: Params
) -> None:
    release = begin(controller, ramp=[])
    controller.decisions.pause(release.id, **PERSON)
    Users(params).crowd(canary=1.0, baseline=1.0, pairs=60)
    controller.tick()
    controller.decisions.resume(release.id, **PERSON)
    controller.tick()
    assert row(controller, release).state == "promoted"


def test_the_first_pause_counts_and_only_a_paused_release_resumes(
    controller: Controller, web: TestClient
) -> None:
    release = begin(controller)
    path = f"/releases/{release.id}"
    not_paused = web.post(f"{path}/resume", json=PERSON)
    assert (not_paused.status_code, "not paused" in not_paused.json()["error"]) == (409, True)
    for name in ("ada", "bob"):
        paused = web.post(f"{path}/pause", json={"by": name, "reason": f"{name}'s."}).json()
        assert [(one["by"], one["reason"]) for one in paused["pauses"]] == [("ada", "ada's.")]
    shown = web.get(path).json()
    assert (shown["paused"]["by"], shown["waits"][0]["has"]) == ("ada", "paused by ada: ada's.")
    resumed = web.post(f"{path}/resume", json=PERSON).json()
    assert resumed["pauses"][-1]["resumed_for"] == "Lunch."
    held = web.post(f"{path}/hold", json=PERSON).json()
    assert held["state"] == "held"
    for decision in ("pause", "resume"):
        assert web.post(f"{path}/{decision}", json=PERSON).status_code == 409


def test_a_pause_by_command_is_one_entry_of_the_audit_log(
    controller: Controller, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(controller, web, monkeypatch)
    release, words = begin(controller), ("sorting", "--by", "ada", "--reason", "Lunch.")
    for decision in ("pause", "resume"):
        said = graftwork("decide", decision, *words)
        assert said.returncode == 0, said.stderr
    assert graftwork("decide", "resume", *words).returncode == 6
    resumed, paused = (json.loads(entry.after) for entry in Audit(controller.catalog.access).newest(2))
    assert [{*paused["pauses"][0]}, {*resumed["pauses"][0]}] == [PAUSED, PAUSED | RESUMED]
    assert row(controller, release).paused is None


def test_each_step_that_asks_for_it_waits_for_an_approval(controller: Controller, clock: Clock) -> None:
    release = begin(controller, approval_s=100, approval_weights=[0.5])
    controller.decisions.approve(release.id, **PERSON)
    after(controller, clock, 51)
    asking = row(controller, release)
    assert (asking.weight, asking.asks, asking.step) == (0.1, 0.5, "canary")
    assert controller.catalog.routes.get("sorting").weight == 0.1
    # Neither `step_s` nor `max_s` runs while it waits.
    after(controller, clock, 90)
    for name in ("bob", "eve"):
        controller.decisions.approve(release.id, name, "It looks right.")
    controller.tick()
    stepped = row(controller, release)
    assert (stepped.weight, stepped.asks, stepped.approved["weight"]) == (0.5, None, 0.1)
    assert [(one["weight"], one["by"]) for one in stepped.approvals] == [(0.5, "bob")]
    after(controller, clock, 48)
    assert row(controller, release).state == "running"
    after(controller, clock, 2)
    assert row(controller, release).reason.startswith("No verdict")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_step_that_nobody_approves_in_time_is_a_hold(
    controller: Controller, clock: Clock, is_restarted: bool
) -> None:
    release = begin(controller, approval_s=100, approval_weights=[0.5])
    controller.decisions.approve(release.id, **PERSON)
    after(controller, clock, 51)
    after(controller, clock, 60, is_restarted)
    controller.decisions.pause(release.id, **PERSON)
    after(controller, clock, 500, is_restarted)
    controller.decisions.resume(release.id, **PERSON)
    after(controller, clock, 38, is_restarted)
    assert row(controller, release).asks == 0.5
    after(controller, clock, 3, is_restarted)
    ended = row(controller, release)
    assert (ended.state, ended.reason) == ("held", "Nobody approved the step to 50% within 100 s.")
    assert controller.catalog.routes.get("sorting").canary is None


def test_harm_ends_a_release_that_waits_for_an_approval(
    controller: Controller, clock: Clock, params: Params
) -> None:
    release = begin(controller, approval_s=100, approval_weights=[0.5])
    controller.decisions.approve(release.id, **PERSON)
    after(controller, clock, 51)
    Users(params).crowd(canary=0.0, baseline=1.0, pairs=20)
    controller.tick()
    assert row(controller, release).state == "rolled_back"


def test_each_change_is_told_once_also_after_a_crash(controller: Controller, clock: Clock) -> None:
    release = begin(controller, approval_s=100, approval_weights=[0.5])
    controller.decisions.approve(release.id, **PERSON)
    after(controller, clock, 51)
    for _ in range(2):
        controller.decisions.pause(release.id, **PERSON)
        controller.decisions.resume(release.id, **PERSON)
    controller.decisions.approve(release.id, **PERSON)
    controller.tick()
    controller.decisions.hold(release.id, **PERSON)
    assert controller.ledger is not None
    controller.applier.say_missing(controller.ledger)
    names = [name.removeprefix("graftwork.release.") for name in told(controller)]
    assert names == [
        "asked", "advanced", "asked", "paused", "resumed", "paused", "resumed", "advanced", "held",
    ]  # fmt: skip


def test_a_change_that_was_not_told_before_a_crash_is_told_after_it(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crash:
        crash.setattr(controller.applier, "_tell", lambda release: release)
        release = begin(controller)
        controller.decisions.pause(release.id, **PERSON)
    assert told(controller) == []
    assert controller.ledger is not None
    for _ in range(2):
        controller.applier.say_missing(controller.ledger)
    assert told(controller) == ["graftwork.release.advanced", "graftwork.release.paused"]


def test_who_waits_for_a_verdict_is_patient_during_a_pause(
    controller: Controller, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.clients.controller.POLL_S", 0.02)
    client = ControllerClient("http://controller")
    client.http = web
    release = begin(controller)
    controller.decisions.pause(release.id, **PERSON)
    seen = iter(range(3))

    def hold_at_last(_: object) -> None:
        if next(seen, 0) == 2:
            controller.decisions.hold(release.id, **PERSON)

    assert client.wait_for_verdict(release.id, 0.01, hold_at_last)["state"] == "held"
    with pytest.raises(Conflict, match="cannot be paused"):
        controller.decisions.pause(release.id, **PERSON)
    assert controller.catalog.routes.get("sorting").champion == OLD
