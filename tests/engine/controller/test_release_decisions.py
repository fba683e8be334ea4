"""What people decide besides promotions: approval, freeze, restore; and what others are told of it."""

import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from engine.catalog.catalog import Catalog, Notice, Release, migrate
from engine.clients.controller import ControllerClient
from engine.controller.__main__ import whole_controller
from engine.controller.release_loop import Controller
from engine.errors import Conflict, Gone, NotFound, ServiceError
from engine.notifications.health_monitor import MISSES, HealthMonitor
from engine.notifications.notices import NotificationSender, notify
from engine.serving.gateway.routing import Router
from engine.settings import releases
from engine.settings.forms import ReleaseForm
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from flows.cli import decisions as decide
from tasks import release as release_steps
from tests.helpers.command_line import graftwork
from tests.helpers.rows import ACCEPTED, NEW, OLD, THIRD, fill, make_revision

PERSON = {"by": "ada", "reason": "I read the answers."}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    params = Params(state_dir=tmp_path / "state", release=ReleaseConfig(min_units=10))
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = whole_controller(params, "test")
    yield controller
    controller.close()


def start(controller: Controller, approval_s: float, digest: str = NEW) -> Release:
    skipped = {"score": "not scored here", "canary": "no users here"}
    release = controller.decisions.start("sorting", digest, {"approval_s": approval_s}, skipped, "me")
    controller.tick()
    return controller.catalog.releases.get(release.id)


def told(controller: Controller) -> list[str]:
    return [notice.name for notice in reversed(controller.catalog.notices.page())]


def test_a_release_waits_for_its_approval_and_no_user_sees_it(
    controller: Controller, web: TestClient
) -> None:
    release = start(controller, approval_s=3600)
    for _ in range(3):
        controller.tick()
    release = controller.catalog.releases.get(release.id)
    assert (release.state, release.step) == ("running", "approval")
    assert controller.catalog.routes.get("sorting").canary is None
    approved = web.post(f"/releases/{release.id}/approve", json=PERSON).json()
    assert approved["approved"]["by"] == "ada"
    again = web.post(f"/releases/{release.id}/approve", json=PERSON | {"by": "bob"}).json()
    assert again["approved"]["by"] == "ada"
    controller.tick()
    assert controller.catalog.releases.get(release.id).state == "promoted"


def test_nobody_answered_in_time_is_a_hold(controller: Controller) -> None:
    release = start(controller, approval_s=0.05)
    time.sleep(0.06)
    controller.tick()
    ended = controller.catalog.releases.get(release.id)
    assert ended.state == "held"
    assert "approv" in ended.reason.lower()
    assert controller.catalog.routes.get("sorting").champion == OLD
    with pytest.raises(Conflict, match="approval"):
        controller.decisions.approve(release.id, "ada", "too late")


def test_an_approval_that_nobody_asked_for_is_refused(controller: Controller, web: TestClient) -> None:
    release = start(controller, approval_s=0)
    assert release.state == "promoted"
    refused = web.post(f"/releases/{release.id}/approve", json=PERSON)
    assert refused.status_code == 409
    assert web.post("/releases/nothing/approve", json=PERSON).status_code == 404


def test_frozen_means_rollbacks_only(controller: Controller, web: TestClient) -> None:
    assert "ada" in web.post("/freeze", json={"by": "ada", "reason": "A holiday."}).json()["frozen"]
    body = {"policy": "sorting", "digest": NEW, "by": "bob", "reason": "now"}
    for path in ("/promote", "/restore"):
        refused = web.post(path, json=body)
        assert refused.status_code == 409
        assert "A holiday." in refused.json()["error"]
    release = start(controller, approval_s=0)
    assert release.state == "running"
    assert web.post("/rollback", json=body | {"digest": OLD}).status_code == 200
    assert controller.catalog.routes.get("sorting").champion is None
    assert web.get("/status").json()["frozen"]
    web.post("/thaw", json=PERSON)
    assert web.get("/status").json()["frozen"] is None
    assert told(controller)[0] == "graftwork.frozen"
    assert "graftwork.thawed" in told(controller)


def test_a_canary_under_users_stays_while_frozen(controller: Controller) -> None:
    release = controller.decisions.start("sorting", NEW, {}, {"score": "not scored here"}, "me")
    controller.tick()
    assert controller.catalog.routes.get("sorting").canary == NEW
    controller.decisions.freeze("ada", "A holiday.")
    with pytest.raises(Conflict, match="A holiday"):
        controller.decisions.hold(release.id, "bob", "enough")
    assert controller.catalog.routes.get("sorting").canary == NEW
    controller.decisions.rollback("sorting", NEW, "bob", "It is rude.")
    assert controller.catalog.routes.get("sorting").canary is None


def test_freezing_twice_keeps_the_first_reason(controller: Controller) -> None:
    first = controller.decisions.freeze("ada", "A holiday.")
    assert controller.decisions.freeze("bob", "Another one.") == first
    controller.decisions.thaw("ada", "Over.")
    controller.decisions.thaw("ada", "Over.")
    assert told(controller).count("graftwork.thawed") == 1


def test_restore_goes_back_to_the_champion_before(controller: Controller, web: TestClient) -> None:
    controller.decisions.promote("sorting", NEW, "ada", "better")
    route = web.post("/restore", json={"policy": "sorting", **PERSON}).json()
    assert (route["champion"], route["previous"]) == (OLD, NEW)
    named = web.post("/restore", json={"policy": "sorting", "digest": THIRD[:12], **PERSON}).json()
    assert named["champion"] == THIRD


def test_restore_without_an_earlier_champion_is_a_sentence(controller: Controller) -> None:
    with pytest.raises(NotFound, match="no previous champion"):
        controller.decisions.restore("sorting", None, "ada", "back")


def test_a_release_replaces_another_one_of_its_policy_if_it_may(
    controller: Controller, web: TestClient
) -> None:
    first = controller.decisions.start("sorting", NEW, {}, {"score": "not scored here"}, "me")
    controller.tick()
    assert controller.catalog.routes.get("sorting").canary == NEW
    body = {"policy": "sorting", "digest": THIRD, "by": "ada", "skip_gates": {"score": "not scored here"}}
    refused = web.post("/releases", json=body)
    assert (refused.status_code, "--if-running" in refused.json()["error"]) == (409, True)
    second = web.post("/releases", json=body | {"replaces": True}).json()
    assert (second["state"], second["revision"], second["baseline"]) == ("running", THIRD, OLD)
    ended = controller.catalog.releases.get(first.id)
    assert (ended.state, ended.approval) == ("held", "ada")
    assert ended.reason == f"Superseded by ada: a release of {THIRD[:12]}."
    route = controller.catalog.routes.get("sorting")
    assert (route.champion, route.canary) == (OLD, None)
    again = web.post("/releases", json=body | {"replaces": True}).json()
    assert (again["id"], again["state"]) == (second["id"], "running")
    controller.tick()
    assert controller.catalog.routes.get("sorting").canary == THIRD


def test_a_revision_of_another_base_is_refused(controller: Controller) -> None:
    foreign = make_revision("f" * 64, policy="sorting", base="another")
    controller.catalog.revisions.add_many([foreign])
    controller.catalog.revisions.set_probe("sorting", foreign.digest, ACCEPTED)
    with pytest.raises(Conflict, match="another base"):
        controller.decisions.start("sorting", foreign.digest, {}, {}, "ada")
    with pytest.raises(Conflict, match="another base"):
        controller.decisions.promote("sorting", foreign.digest, "ada", "better")
    assert controller.catalog.releases.all() == []
    assert controller.catalog.routes.get("sorting").champion == OLD


UNFIT = {
    "tombstone": lambda controller: controller.decisions.rollback("sorting", THIRD, "ada", "It lies."),
    "retired": lambda controller: controller.catalog.lifecycle.retire("sorting", THIRD, "ada", "Too old."),
    "frozen": lambda controller: controller.decisions.freeze("ada", "A holiday."),
}


@pytest.mark.parametrize("why", UNFIT)
def test_what_cannot_start_replaces_nothing(controller: Controller, why: str) -> None:
    first = controller.decisions.start("sorting", NEW, {}, {"score": "not scored here"}, "me")
    controller.tick()
    UNFIT[why](controller)
    with pytest.raises(Conflict):
        controller.decisions.start("sorting", THIRD, {}, {}, "ada", replaces=True)
    assert controller.catalog.releases.get(first.id).state == "running"
    assert controller.catalog.routes.get("sorting").canary == NEW


def test_a_release_waits_for_another_one_of_its_policy_if_it_may(
    controller: Controller, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ControllerClient("http://controller")
    client.http = web
    monkeypatch.setattr(release_steps, "controller", lambda _: nullcontext(client))
    first = controller.decisions.start("sorting", NEW, {"approval_s": 60}, {}, "me")
    form = ReleaseForm(policy="sorting", digest=THIRD, by="ada", skip_score="not scored here")
    with pytest.raises(Conflict, match="Another release"):
        release_steps.start_release(controller.params, form)
    patient = form.model_copy(update={"if_running": "wait"})
    with ThreadPoolExecutor() as pool:
        second = pool.submit(release_steps.start_release, controller.params, patient)
        with pytest.raises(TimeoutError):
            second.result(0.6)
        controller.decisions.hold(first.id, "bob", "lunch")
        assert second.result(60)["revision"] == THIRD
    assert controller.catalog.releases.get(first.id).reason == "lunch"
    # Its own release is no reason to wait.
    assert release_steps.start_release(controller.params, patient)["revision"] == THIRD


def test_a_release_waits_no_longer_than_the_other_may_take(
    controller: Controller, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ControllerClient("http://controller")
    client.http = web
    monkeypatch.setattr(release_steps, "controller", lambda _: nullcontext(client))
    monkeypatch.setattr(release_steps, "GATES_S", 0.0)
    monkeypatch.setattr(releases, "LOAD_S", 0.1)
    first = controller.decisions.start("sorting", NEW, {"max_s": 0.1}, {}, "me")
    form = ReleaseForm(policy="sorting", digest=THIRD, by="ada", if_running="wait")
    with pytest.raises(ServiceError, match=first.id):
        release_steps.start_release(controller.params, form)
    assert controller.catalog.releases.get(first.id).state == "running"


COMMANDS = [
    ("decide promote", f"sorting@{NEW[:12]}", "promote", NEW, NEW),
    ("rollback", f"sorting@{OLD[:12]}", "rollback", OLD, None),
    ("decide hold", "sorting", "hold", THIRD, OLD),
    ("decide restore", f"sorting@{NEW[:12]}", "promote", NEW, NEW),
]


@pytest.mark.parametrize(("command", "subject", "verdict", "digest", "champion"), COMMANDS)
def test_a_persons_command_takes_effect_at_once_and_is_recorded(
    controller: Controller,
    web: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    subject: str,
    verdict: str,
    digest: str,
    champion: str | None,
) -> None:
    """While a release of a third revision waits for its approval."""
    given(controller, web, monkeypatch)
    start(controller, approval_s=60, digest=THIRD)
    router, began = Router(controller.catalog, "tiny", "base"), time.time()
    assert router.resolve("sorting", "u").digest == OLD
    said = graftwork(*command.split(), subject, "--by", "ada", "--reason", "I read the answers.")
    assert said.returncode == 0, said.stderr
    assert time.time() - began < 50
    assert router.resolve("sorting", "u").digest == champion
    controller.spool.rotate()
    controller.tick()
    assert controller.ledger is not None
    rows = controller.ledger.connection.execute(
        'SELECT verdict, "by", reason FROM verdicts WHERE digest = ? AND "at" >= ?', [digest, began]
    ).fetchall()
    assert rows == [(verdict, "ada", "I read the answers.")]


def test_a_lift_takes_effect_at_once_and_is_recorded(
    controller: Controller, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(controller, web, monkeypatch)
    controller.decisions.rollback("sorting", OLD, "ada", "It is rude.")
    router, began = Router(controller.catalog, "tiny", "base"), time.time()
    with pytest.raises(Gone, match="It is rude"):
        router.resolve(f"sorting@{OLD[:12]}", "u")
    said = graftwork("rollback", "--lift", f"sorting@{OLD[:12]}", "--by", "bob", "--reason", "It is not.")
    assert said.returncode == 0, said.stderr
    assert router.resolve(f"sorting@{OLD[:12]}", "u").digest == OLD
    query = "SELECT lifted_by, lifted_reason FROM tombstones WHERE lifted_at >= ?"
    with sqlite3.connect(controller.params.paths.root / "catalog.db") as catalog:
        assert catalog.execute(query, [began]).fetchall() == [("bob", "It is not.")]


def given(controller: Controller, web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the commands ask this controller."""
    client = ControllerClient("http://controller")
    client.http = web
    monkeypatch.setattr(decide, "reach", lambda params: nullcontext(client))
    monkeypatch.setattr("tasks.approval.wake_waiting", lambda policy, answer: None)


def test_each_end_of_a_release_is_told_once_with_reason_and_link(controller: Controller) -> None:
    release = start(controller, approval_s=0)
    controller.tick()
    (notice,) = controller.catalog.notices.page()
    assert (notice.name, notice.revision) == ("graftwork.release.promoted", NEW)
    assert notice.reason == controller.catalog.releases.get(release.id).reason
    assert notice.link.endswith(f"/releases/{release.id}")


def test_a_refused_probe_is_told_too(controller: Controller) -> None:
    controller.catalog.revisions.set_probe("sorting", NEW, {"accepted": False, "reason": "It is the base."})
    start(controller, approval_s=0)
    assert sorted(told(controller)) == ["graftwork.release.held", "graftwork.revision.refused"]


class Server:
    """Prefect's events endpoint, at the boundary."""

    def __init__(self) -> None:
        self.down, self.events, self.refused = False, dict[str, dict](), ""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            return httpx.Response(503)
        assert request.url.path == "/api/events"
        if self.refused and self.refused in request.content.decode():
            return httpx.Response(422)
        self.events |= {event["id"]: event for event in json.loads(request.content)}
        return httpx.Response(204)


def test_notices_wait_for_prefect_and_arrive_once(controller: Controller) -> None:
    server = Server()
    client = httpx.Client(base_url="http://prefect", transport=httpx.MockTransport(server))
    sender = NotificationSender(controller.catalog, client)
    for _ in range(2):
        notify(controller.catalog, "policy.drift", "Users like it less.", "http://page", "", "sorting", OLD)
    notify(controller.catalog, "engine.down", "It is gone.", "http://page", "7.0")
    server.down = True
    with pytest.raises(httpx.HTTPStatusError):
        sender.send()
    server.down = False
    assert sender.send() == 2
    assert sender.send() == 0
    names = {event["event"]: event for event in server.events.values()}
    assert set(names) == {"graftwork.policy.drift", "graftwork.engine.down"}
    payload = names["graftwork.policy.drift"]["payload"]
    assert payload == {
        "revision": f"sorting@{OLD[:12]}", "reason": "Users like it less.", "link": "http://page",
    }  # fmt: skip
    assert names["graftwork.engine.down"]["resource"]["prefect.resource.id"] == "graftwork.engine"


def test_a_notice_that_prefect_refuses_keeps_back_no_other(controller: Controller) -> None:
    server = Server()
    server.refused = "of no use"
    client = httpx.Client(base_url="http://prefect", transport=httpx.MockTransport(server))
    sender = NotificationSender(controller.catalog, client)
    notify(controller.catalog, "policy.drift", "This is of no use.", "http://page", "", "sorting", OLD)
    notify(controller.catalog, "policy.drift", "Users like it less.", "http://page", "", "sorting", NEW)
    assert sender.send() == 2
    assert [event["payload"]["revision"] for event in server.events.values()] == [f"sorting@{NEW[:12]}"]
    assert sender.send() == 0


def test_an_engine_that_goes_and_comes_back_is_told_once_each(controller: Controller) -> None:
    healthy = False

    def engine(request: httpx.Request) -> httpx.Response:
        if not healthy:
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    monitor = HealthMonitor(controller.catalog, controller.params)
    monitor.engine.http = httpx.Client(base_url="http://engine", transport=httpx.MockTransport(engine))
    for _ in range(2 * MISSES):
        monitor.look()
    assert told(controller) == []  # it has not started yet
    for healthy in (True, *[False] * (2 * MISSES), True, True):  # noqa: B007
        monitor.look()
    assert told(controller) == ["graftwork.engine.down", "graftwork.engine.up"]


def test_automations_post_back_to_the_page(controller: Controller, web: TestClient) -> None:
    web.post("/notices/inbox", json={"text": 'sorting "rolled" back', "link": "http://page"})
    (row,) = web.get("/notices").json()
    told = ("graftwork.notice.delivered", 'sorting "rolled" back', "http://page")
    assert (row["name"], row["reason"], row["link"]) == told
    for body in ("no json", "[1]", '{"text": 3}', "{}"):
        assert web.post("/notices/inbox", content=body).status_code == 200


def test_a_notice_is_a_row_once(controller: Controller) -> None:
    notice = Notice("n1", "graftwork.policy.drift", "sorting", OLD, "r", "l", 1.0)
    assert controller.catalog.notices.add(notice)
    assert not controller.catalog.notices.add(notice)
    assert len(controller.catalog.notices.page(unsent=True)) == 1
