"""Alarms leave the machine: what lasts is a notification, and so is its end."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from fastapi.testclient import TestClient

from engine.catalog.catalog import migrate
from engine.controller import alarms as alarms_of
from engine.controller import release_loop
from engine.controller.__main__ import whole_app
from engine.controller.alarms import alarms
from engine.controller.release_loop import Controller
from engine.errors import ServiceError
from engine.notifications.alarm_watch import LASTS_S, AlarmWatch
from engine.notifications.notices import NotificationSender, event_of
from engine.security.credentials import credential
from engine.settings.params import Params
from engine.threads import WORKS
from tasks.notifications import BAD_NEWS


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    params = Params(state_dir=tmp_path / "state")
    migrate(params.paths.catalog_url)
    # What runs beside other tests is none of this controller's.
    monkeypatch.setattr(alarms_of, "WORKS", {})
    # Its loop does not turn, so it would count as stalled after five seconds of any pause.
    monkeypatch.setattr(release_loop, "STALLED_S", 60.0)
    controller = Controller(params, "test")
    yield controller
    controller.close()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(controller: Controller) -> list[tuple[str, str]]:
    return [(one.name, one.reason) for one in reversed(controller.catalog.notices.page())]


def test_an_alarm_that_lasts_is_told_once_and_so_is_its_end(controller: Controller) -> None:
    clock = Clock()
    watch = AlarmWatch(controller, clock)
    controller.faults["ingest"] = "The disk is full."
    watch.look()
    clock.now += LASTS_S - 1
    watch.look()
    assert told(controller) == []
    # What a fault says may change while it lasts.
    controller.faults["ingest"] = "The disk is full, still."
    for _ in range(3):
        clock.now += 1
        watch.look()
    began = ("graftwork.alarm.began", "ingest: The disk is full, still.")
    assert told(controller) == [began]
    controller.faults.clear()
    for _ in range(3):
        watch.look()
    assert told(controller) == [began, ("graftwork.alarm.ended", "ingest: over after 17 s.")]
    assert event_of(controller.catalog.notices.page()[0])["resource"]["prefect.resource.id"] == (
        "graftwork.controller"
    )
    # The next time is another alarm.
    controller.faults["ingest"] = "The disk is full."
    watch.look()
    clock.now += LASTS_S
    watch.look()
    assert len(told(controller)) == 3
    assert began[0] in BAD_NEWS


def test_what_is_over_soon_is_nobodys_business(controller: Controller) -> None:
    clock = Clock()
    watch = AlarmWatch(controller, clock)
    for _ in range(5):
        controller.faults["snapshot"] = "It is locked."
        watch.look()
        clock.now += LASTS_S - 1
        controller.faults.clear()
        watch.look()
        clock.now += LASTS_S
    assert told(controller) == []


def test_an_alarm_that_could_not_be_stored_is_told_later(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = AlarmWatch(controller, clock)
    controller.faults["lease"] = "The catalog cannot be read."
    watch.look()
    clock.now += LASTS_S
    monkeypatch.setattr(controller.catalog.notices, "add", Mock(side_effect=ServiceError("It is away.")))
    with pytest.raises(ServiceError):
        watch.look()
    monkeypatch.undo()
    watch.look()
    assert [name for name, _ in told(controller)] == ["graftwork.alarm.began"]


def test_a_notifier_that_fails_is_an_alarm(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms_of, "WORKS", WORKS)
    client = Mock()
    client.post.side_effect = ConnectionError("Prefect does not answer.")
    sender = NotificationSender(controller.catalog, client)
    controller.catalog.notices.add(_notice())
    sender.work.turn(sender.send)
    # The next turn may succeed.
    assert "notifications" not in alarms(controller)
    sender.work.turn(sender.send)
    assert "Prefect does not answer" in alarms(controller)["notifications"]
    app = whole_app(controller, Mock(fault=None))
    headers = {"authorization": f"Bearer {credential(controller.params.paths, 'controller')}"}
    web = TestClient(app, headers=headers)
    status = web.get("/status").json()
    assert status["status"] == "degraded"
    assert any(line.startswith("notifications: ConnectionError") for line in status["alarms"])
    metrics = web.get("/metrics").text
    assert "graftwork_notifications_unsent 1.0" in metrics
    assert f"graftwork_alarms {float(len(status['alarms']))}" in metrics
    client.post.side_effect = None
    client.post.return_value = Mock(status_code=201, is_client_error=False)
    sender.work.turn(sender.send)
    assert "notifications" not in alarms(controller)
    assert "graftwork_notifications_unsent 0.0" in web.get("/metrics").text
    sender.stop()


def _notice():
    from engine.catalog.catalog import Notice

    return Notice("n1", "graftwork.release.held", "sums", None, "r", "", time.time())


def test_rejected_files_and_a_full_disk_are_alarms(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alarms(controller) == {}
    rejected = controller.params.paths.spool / "rejected"
    rejected.mkdir()
    (rejected / "one.jsonl").write_text("{}\n")
    monkeypatch.setattr(alarms_of.shutil, "disk_usage", lambda _: Mock(free=1 << 20))
    assert alarms(controller).keys() == {"spool", "disk"}
