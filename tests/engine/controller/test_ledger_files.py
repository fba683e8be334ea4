"""A large ledger is rewritten and copied while the controller's loop ingests, judges and rolls back."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from engine.catalog.catalog import Catalog, migrate
from engine.controller import ledger_files
from engine.controller import release_loop as loop
from engine.controller.__main__ import whole_controller
from engine.controller.release_loop import Controller
from engine.errors import ServiceError
from engine.ledger.ledger import open_snapshot
from engine.ledger.purge import create_like_source
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from engine.threads import background
from tests.helpers.canary_users import Users
from tests.helpers.live import eventually
from tests.helpers.rows import NEW, fill

SENDFILE = os.sendfile
SECRET = os.urandom(600).hex()
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TICK_S", 0.05)
    monkeypatch.setattr(loop, "SNAPSHOT_S", 0.1)


@pytest.fixture
def params(tmp_path: Path) -> Params:
    return Params(
        state_dir=tmp_path / "state",
        release=ReleaseConfig(min_units=10),
    )


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every ledger for a large one; asked for before `controller`, whose loop reads this each turn."""
    monkeypatch.setattr(ledger_files, "SMALL", 0)


@pytest.fixture
def controller(params: Params) -> Iterator[Controller]:
    """A controller whose loop turns in a thread of its own."""
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = whole_controller(params, "test")
    turning = background(controller.run)
    yield controller
    controller.stop()
    assert turning.exception(LIMIT_S) is None
    controller.close()


@pytest.fixture
def users(params: Params) -> Users:
    return Users(params)


class Held:
    """A call that waits inside until `go_on` is set; `times` counts how often it began."""

    def __init__(self, whole: Callable[..., Any]):
        self.whole, self.times = whole, 0
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *given: Any) -> Any:
        self.times += 1
        self.begun.set()
        assert self.go_on.wait(LIMIT_S)
        return self.whole(*given)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str, whole: Callable[..., Any]) -> Iterator[Held]:
    slow = Held(whole)
    with monkeypatch.context() as patch:
        patch.setattr(name, slow)
        try:
            yield slow
        finally:
            slow.go_on.set()


@contextmanager
def slow_rewrite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    with held(monkeypatch, "engine.ledger.purge.create_like_source", create_like_source) as slow:
        yield slow


@contextmanager
def slow_copy(monkeypatch: pytest.MonkeyPatch, params: Params) -> Iterator[Held]:
    """Hold copies of this ledger: whatever else copies files in this process goes on."""
    slow = Held(SENDFILE)

    def sendfile(to: int, *given: Any) -> Any:
        is_ours = Path(f"/proc/self/fd/{to}").readlink().is_relative_to(params.paths.root)
        return (slow if is_ours else SENDFILE)(to, *given)

    with monkeypatch.context() as patch:
        patch.setattr("os.sendfile", sendfile)
        try:
            yield slow
        finally:
            slow.go_on.set()


def emit_gone(users: Users, number: int = 20) -> None:
    for at in range(number):
        id = users.spool.emit("observations", policy="gone", key="theirs", unit=SECRET, at=float(at))
        users.spool.emit("feedback", request_id=id, reward=1.0, key="theirs", at=float(at))
    users.spool.rotate()


def in_snapshot(params: Params, query: str) -> list[tuple[Any, ...]]:
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        return ledger.execute(query).fetchall()


def soon(params: Params, query: str, wanted: list[tuple[Any, ...]]) -> bool:
    return eventually(lambda: params.paths.ledger_snapshot.is_file() and in_snapshot(params, query) == wanted)


def holds_secret(params: Params) -> list[Path]:
    found = []
    for file in params.paths.root.rglob("*"):
        # The loop renames and removes files of its own between any two of these looks.
        with suppress(FileNotFoundError):
            if file.is_file() and SECRET.encode() in file.read_bytes():
                found.append(file)
    return found


def see_a_bad_canary_rolled_back(controller: Controller, users: Users) -> None:
    """Take a release from its start to its end, on events that come now."""
    release = controller.decisions.start("sorting", NEW, {}, {"score": "not scored here"}, "me")
    assert eventually(lambda: controller.catalog.routes.get("sorting").canary == NEW)
    users.crowd(canary=0.0, baseline=1.0, pairs=8)
    assert eventually(lambda: controller.catalog.releases.get(release.id).state == "rolled_back")


def health(web: TestClient) -> tuple[int, Any]:
    answer = web.get("/health")
    return answer.status_code, answer.json()


def begin(controller: Controller, ask: str) -> Future[object]:
    """Ask for a removal of what `emit_gone` emits; return the future of its answer."""
    if ask == "retention":
        config = controller.params.controller.model_copy(update={"observations_days": 1})
        controller.params = controller.params.model_copy(update={"controller": config})
        controller.due.pop("retention", None)
        return background(lambda: eventually(lambda: "retention" not in controller.files.under_way()))
    files = controller.files
    return background(lambda: files.purge("gone") if ask == "purge" else files.erase(["theirs"]))


@pytest.mark.long
@pytest.mark.parametrize("ask", ["purge", "erase", "retention"])
def test_rows_are_removed_while_the_loop_judges(
    controller: Controller,
    params: Params,
    users: Users,
    web: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    ask: str,
) -> None:
    emit_gone(users)
    assert soon(params, "SELECT count(*) FROM feedback", [(20,)])
    with slow_rewrite(monkeypatch) as slow:
        answer = begin(controller, ask)
        assert slow.begun.wait(LIMIT_S)
        see_a_bad_canary_rolled_back(controller, users)
        # A loop that stands still stays stalled; one that a pause of the machine held up turns again.
        assert eventually(lambda: health(web) == (200, {"status": "ok"}))
        assert eventually(lambda: web.get("/status").json()["status"] == "ok")
        status = web.get("/status").json()
        assert (status["alarms"], ask in status["under_way"]) == ([], True)
        # What comes meanwhile goes with the rest, or stays once.
        emit_gone(users, 3)
        assert soon(params, "SELECT count(*) FROM observations", [(63,)])
        slow.go_on.set()
        answer.result(LIMIT_S)
    assert soon(params, "SELECT count(*), count(DISTINCT id) FROM observations", [(40, 40)])
    assert soon(params, "SELECT count(*), count(DISTINCT id) FROM feedback", [(40, 40)])
    assert soon(params, "SELECT verdict FROM verdicts", [("rollback",)])
    assert eventually(lambda: holds_secret(params) == [])
    assert controller.faults == {}
    assert eventually(lambda: web.get("/status").json()["under_way"] == [])


@pytest.mark.long
@pytest.mark.usefixtures("large")
def test_a_large_ledger_is_copied_while_the_loop_judges(
    controller: Controller, params: Params, users: Users, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_copy(monkeypatch, params) as slow:
        emit_gone(users)
        assert slow.begun.wait(LIMIT_S)
        see_a_bad_canary_rolled_back(controller, users)
        assert eventually(lambda: health(web) == (200, {"status": "ok"}))
        assert web.get("/status").json()["under_way"] == ["copy"]
        assert slow.times == 1
        slow.go_on.set()
        assert soon(params, "SELECT verdict FROM verdicts", [("rollback",)])
    assert in_snapshot(params, "SELECT count(*), count(DISTINCT id) FROM observations") == [(60, 60)]
    assert eventually(lambda: web.post("/ledger", json={}).json() == {"published": True})


@pytest.mark.usefixtures("large")
def test_a_copy_that_fails_is_an_alarm_until_the_next(
    controller: Controller, params: Params, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.sendfile", full)
        emit_gone(users)
        assert eventually(lambda: "space" in controller.faults.get("ledger copy", ""))
        see_a_bad_canary_rolled_back(controller, users)
        disk.setattr("os.sendfile", SENDFILE)
        assert soon(params, "SELECT verdict FROM verdicts", [("rollback",)])
        assert eventually(lambda: controller.faults == {})
    assert list(params.paths.root.glob("ledger.snapshot.duckdb.*")) == []


def test_who_asks_again_waits_for_the_same_removal(
    controller: Controller, params: Params, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit_gone(users)
    assert soon(params, "SELECT count(*) FROM observations", [(20,)])
    waiting, background = list[float](), ledger_files.background

    def noted(work: Any) -> Future[Any]:
        future = background(work)
        result = future.result

        def waited_for(seconds: float) -> Any:
            waiting.append(seconds)
            return result(seconds)

        monkeypatch.setattr(future, "result", waited_for)
        return future

    monkeypatch.setattr(ledger_files, "background", noted)
    with slow_rewrite(monkeypatch) as slow:
        with monkeypatch.context() as patch:
            patch.setattr(ledger_files, "ANSWER_S", 0.1)
            with pytest.raises(ServiceError, match="sk again"):
                controller.files.purge("gone")
        again = [begin(controller, "purge") for _ in range(2)]
        assert slow.begun.wait(LIMIT_S)
        # Both have asked before it ends: who asks later asks for another removal.
        assert eventually(lambda: len(waiting) == 3)
        slow.go_on.set()
        answers = [one.result(LIMIT_S) for one in again]
    assert slow.times == 1
    assert answers[0] == answers[1]
    assert answers[0]["observations"] == 20
    # An end that was not heard of is asked for again.
    assert not any(controller.files.purge("gone").values())


def test_a_removal_that_fails_leaves_the_ledger_as_it_was(
    controller: Controller, params: Params, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit_gone(users)
    assert soon(params, "SELECT count(*) FROM observations", [(20,)])
    for place in ("engine.ledger.purge.create_like_source", "engine.ledger.purge._count"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fails)
            with pytest.raises(OSError, match="space"):
                controller.files.purge("gone")
        see_a_bad_canary_rolled_back(controller, users)
        controller.catalog.tombstones.lift("sorting", NEW, "me", "try again")
    assert soon(params, "SELECT count(*), count(DISTINCT id) FROM observations", [(100, 100)])
    assert controller.files.purge("gone")["observations"] == 20
    assert soon(params, "SELECT count(*), count(DISTINCT id) FROM observations", [(80, 80)])
    assert controller.faults == {}


def fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.long
def test_a_canary_counts_every_rating_once_though_its_rows_get_other_numbers(
    controller: Controller, users: Users
) -> None:
    emit_gone(users)
    release = controller.decisions.start("sorting", NEW, {"margin": 0.0}, {"score": "not scored here"}, "me")
    assert eventually(lambda: controller.catalog.routes.get("sorting").canary == NEW)
    users.crowd(canary=1.0, baseline=1.0, pairs=4)
    assert eventually(lambda: seen(controller, release.id) == (4, 16))
    # The users before get the numbers of what goes, and those who come the numbers of the users before.
    assert controller.files.purge("gone")["feedback"] == 20
    users.crowd(canary=1.0, baseline=1.0, pairs=4)
    assert eventually(lambda: seen(controller, release.id) == (8, 32))
    counts = controller.latest[release.id].canary.feedback
    assert (counts.answers, counts.rated, counts.doubled) == (40, 40, 0)


def seen(controller: Controller, release_id: str) -> tuple[int, int]:
    if (latest := controller.latest.get(release_id)) is None:
        return 0, 0
    return latest.canary.canary_units, latest.canary.baseline_units


def test_nothing_is_swept_while_rows_are_removed(
    controller: Controller, params: Params, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are told by their numbers, which may be given again after a deletion."""
    emit_gone(users)
    assert soon(params, "SELECT count(*) FROM feedback", [(20,)])
    with slow_rewrite(monkeypatch) as slow:
        answer = begin(controller, "purge")
        assert slow.begun.wait(LIMIT_S)
        users.spool.emit("feedback", request_id="unknown", reward=1.0, key="k", at=1.0)
        users.spool.rotate()
        assert soon(params, "SELECT count(*) FROM feedback", [(21,)])
        turned = controller.last_tick
        controller.due.pop("sweep")
        assert eventually(lambda: controller.last_tick > turned and "sweep" in controller.due)
        slow.go_on.set()
        answer.result(LIMIT_S)
    assert soon(params, "SELECT request_id FROM feedback", [("unknown",)])


def test_a_copy_that_takes_long_is_made_in_a_tenth_of_the_time(
    tmp_path: Path, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, copies = [0.0], []
    monkeypatch.setattr(ledger_files, "monotonic", lambda: clock[0])
    files = ledger_files.LedgerFiles(Params(state_dir=tmp_path).paths, lambda work: None, lambda *_: None)

    def publish() -> None:
        copies.append(clock[0])
        clock[0] += 10

    monkeypatch.setattr(files, "publish", publish)
    changed: Any = SimpleNamespace(is_copied=lambda _: False, size=lambda: 1)
    for now in (0.0, 10.0, 99.0, 100.0, 120.0):
        clock[0] = max(clock[0], now)
        files.refresh(changed)
        assert eventually(lambda: not files.under_way())
    assert copies == [0.0, 100.0]
