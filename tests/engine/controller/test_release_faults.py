"""A release under faults around it: two controllers, full disks, servers that hang, poisoned feedback."""

import contextlib
import errno
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.catalog.catalog import Catalog, Release, migrate
from engine.controller.__main__ import whole_controller
from engine.controller.release_loop import Controller
from engine.controller.route_changes import LEASE
from engine.errors import Conflict
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry
from engine.notifications.notices import NotificationSender
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.canary_users import Users
from tests.helpers.driven_release import CANARIES, SETTINGS, Boundary, drive
from tests.helpers.rows import NEW, OLD, fill

SKIPPED = {"score": "not scored here"}


@pytest.fixture
def params(tmp_path: Path) -> Params:
    settings = ReleaseConfig(min_units=10)
    return Params(state_dir=tmp_path / "state", release=settings)


@pytest.fixture
def controller(params: Params) -> Iterator[Controller]:
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = whole_controller(params, "first")
    yield controller
    controller.close()


@pytest.fixture
def users(params: Params) -> Users:
    return Users(params)


def start(controller: Controller) -> Release:
    release = controller.decisions.start("sorting", NEW, {}, SKIPPED, "me")
    controller.tick()
    assert controller.catalog.routes.get("sorting").canary == NEW
    return release


def state_of(controller: Controller, release: Release) -> str:
    return controller.catalog.releases.get(release.id).state


def said(controller: Controller) -> list[tuple[Any, ...]]:
    controller.spool.rotate()
    controller.tick()
    assert controller.ledger is not None
    return controller.ledger.connection.execute("SELECT verdict, digest FROM verdicts").fetchall()


def test_another_controller_takes_over_once_the_lease_has_expired(
    params: Params, controller: Controller, users: Users
) -> None:
    """The first one has been killed: its ledger is free, and its lease is not given back."""
    release = start(controller)
    users.crowd(canary=0.0, baseline=1.0, pairs=8)
    assert controller.ledger is not None
    controller.ledger.close()
    lease = controller.catalog.leases.find(LEASE)
    assert lease is not None
    # For longer than the machine may stand still.
    controller.catalog.leases.renew(LEASE, "first", lease.fence, ttl_s=60)
    with pytest.raises(Conflict, match="first"):
        whole_controller(params, "second")
    # As if its time had passed.
    controller.catalog.leases.renew(LEASE, "first", lease.fence, ttl_s=-1)
    second = whole_controller(params, "second")
    try:
        second.tick()
        assert state_of(second, release) == "rolled_back"
        controller.due.clear()
        with pytest.raises(Conflict, match="taken the lease"):
            controller.tick()
    finally:
        second.close()


class Said:
    """A spool in memory."""

    def __init__(self) -> None:
        self.verdicts: set[str] = set()

    def emit(self, table: str, **fields: Any) -> None:
        if table == "verdicts":
            self.verdicts.add(fields["id"])


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog in which a release is about to begin."""
    file = tmp_path_factory.mktemp("waiting") / "catalog.db"
    migrate(f"sqlite:///{file}")
    with Catalog(f"sqlite:///{file}") as catalog:
        fill(catalog)
        gates = {"score": {"by": "me", "reason": "not scored here"}}
        catalog.releases.add(
            Release("r", "sorting", NEW, OLD, "probe", 0.2, "running", SETTINGS, 1.0, 1.0, skip_gates=gates)
        )
    return file


def interrupted(file: Path, number: int, first: str, second: str) -> bool:
    """Drive a release, and have another controller finish it after the first one's n-th effect.

    Return whether there was an n-th effect. What the second one left may not change: only a tombstone may
    come, of harm that the first one sees where the other one holds.
    """
    said, ended, countdown = Said(), list[Any](), itertools.count(1)
    with Catalog(f"sqlite:///{file}") as catalog:

        def state() -> Any:
            stones = () if (first, second) == ("rollback", "hold") else catalog.tombstones.in_force()
            return catalog.releases.get("r"), catalog.routes.get("sorting"), stones

        def finish() -> None:
            drive(catalog, said, CANARIES[second])
            ended.append(state())

        # Its compare-and-swap may fail, which the loop takes as an alarm.
        with contextlib.suppress(Conflict):
            drive(
                Boundary(catalog, countdown, number, then=finish),
                Boundary(said, countdown, number, then=finish),
                CANARIES[first],
            )
        assert not ended or ended == [state()], f"after effect {number}"
    assert len(said.verdicts) == 1
    return bool(ended)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Two that judge alike take the same steps up to the last.
        pytest.param(first, second, marks=pytest.mark.slow if first == second else ())
        for first, second in itertools.product(CANARIES, repeat=2)
    ],
)
def test_a_controller_that_wakes_up_late_changes_nothing(
    waiting: Path, tmp_path: Path, first: str, second: str
) -> None:
    """It stands still after each of its effects, and another one finishes by what it sees itself."""
    for number in itertools.count(1):
        if not interrupted(Path(shutil.copy(waiting, tmp_path / f"{number}.db")), number, first, second):
            break
    assert number > 8


@pytest.mark.parametrize(("reward", "state"), [(0.0, "rolled_back"), (1.0, "promoted")])
def test_a_full_disk_of_the_spool_stops_no_verdict_and_loses_none(
    controller: Controller, users: Users, monkeypatch: pytest.MonkeyPatch, reward: float, state: str
) -> None:
    release, emit = start(controller), controller.spool.emit
    users.crowd(canary=reward, baseline=1.0, pairs=8 if state == "rolled_back" else 60)
    lost = []

    def full(table: str, **fields: Any) -> None:
        lost.append(table)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(controller.spool, "emit", full)
    for _ in range(4):
        controller.tick()
    route = controller.catalog.routes.get("sorting")
    assert (route.champion, route.canary) == (NEW if state == "promoted" else OLD, None)
    assert (controller.catalog.tombstones.find("sorting", NEW) is not None) == (state == "rolled_back")
    assert lost
    monkeypatch.setattr(controller.spool, "emit", emit)
    controller.tick()
    assert state_of(controller, release) == state
    assert controller.faults == {}
    assert said(controller) == [("rollback" if state == "rolled_back" else "promote", NEW)]


def test_a_verdict_that_a_full_disk_swallowed_is_said_later_without_a_restart(
    controller: Controller, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, emit = start(controller), controller.spool.emit
    users.crowd(canary=0.0, baseline=1.0, pairs=8)

    def full_for_verdicts(table: str, **fields: Any) -> None:
        if table == "verdicts":
            raise OSError(errno.ENOSPC, "No space left on device")
        emit(table, **fields)

    monkeypatch.setattr(controller.spool, "emit", full_for_verdicts)
    controller.tick()
    # The release has ended, so that the next turn does not come back to it.
    assert state_of(controller, release) == "rolled_back"
    monkeypatch.setattr(controller.spool, "emit", emit)
    controller.tick()
    assert said(controller) == [("rollback", NEW)]


class Hanging(httpx.BaseTransport):
    """A server that takes requests and does not answer until `go_on` is set."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        self.go_on.wait(30)
        raise httpx.ReadTimeout("It did not answer.")


def test_servers_that_hang_delay_no_verdict_and_no_person(controller: Controller, users: Users) -> None:
    """MLflow and Prefect take requests and do not answer."""
    release, hanging = start(controller), Hanging()
    client = httpx.Client(transport=hanging, base_url="http://mlflow")
    registry = Registry(client)
    mirror = AliasMirror(controller.catalog, controller.decisions, registry)
    sender = NotificationSender(controller.catalog, client)
    mirror.start()
    sender.start()
    try:
        assert hanging.asked.wait(60)
        users.crowd(canary=0.0, baseline=1.0, pairs=8)
        began = time.monotonic()
        controller.tick()
        assert state_of(controller, release) == "rolled_back"
        with controller.decisions.lock:
            controller.decisions.lift("sorting", NEW, "ann", "Once more.")
            controller.decisions.promote("sorting", NEW, "ann", "It is better.")
        assert time.monotonic() - began < 20
        assert controller.catalog.routes.get("sorting").champion == NEW
    finally:
        hanging.go_on.set()
        for thread in (mirror, sender):
            thread.stop()
            thread.join()
    # Nothing is lost of what Prefect did not take.
    assert len(controller.catalog.notices.page(unsent=True)) >= 1


POISON = 10_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("units", "reward"),
    [(1, 1.0), (POISON, 1.0), (POISON, 0.0)],
    ids=["perfect, one user", "perfect, 10,000 users", "zero, 10,000 users"],
)
def test_one_key_among_several_neither_promotes_nor_rolls_back(
    controller: Controller, users: Users, units: int, reward: float
) -> None:
    """Its users praise or damn the canary 10,000 times, and say the opposite of the champion."""
    release = start(controller)
    version = controller.catalog.routes.get("sorting").version
    for number in range(POISON):
        unit, is_canary = f"u{number % units}", number % 5 == 0
        digest, arm, value = (NEW, "canary", reward) if is_canary else (OLD, "champion", 1 - reward)
        users.spool.emit(
            "observations", id=f"p{number}", at=time.time(), unit=unit, route_version=version, key="eve",
            policy="sorting", purpose="user", digest=digest, arm=arm,
        )  # fmt: skip
        users.spool.emit("feedback", request_id=f"p{number}", reward=value, key="eve", at=time.time())
    # What the others say is the truth, and by itself it is not enough yet.
    for key in ("ann", "bob"):
        users.crowd(canary=0.5, baseline=0.5, pairs=4, key=key)
    controller.tick()
    assert state_of(controller, release) == "running"
    seen = controller.latest[release.id].canary
    assert seen.feedback.rated == POISON + 40
    if units > 1:
        assert "key eve alone" in seen.guards[0].note
    assert controller.catalog.routes.get("sorting").canary == NEW


@pytest.mark.parametrize(("truth", "state"), [(0.0, "rolled_back"), (1.0, "promoted")])
def test_the_others_still_decide_beside_a_key_that_lies(
    controller: Controller, users: Users, truth: float, state: str
) -> None:
    release = start(controller)
    users.crowd(canary=1 - truth, baseline=0.5, pairs=10, key="eve")
    for key in ("ann", "bob", "carl"):
        users.crowd(canary=truth, baseline=1.0, pairs=80, key=key)
    controller.tick()
    assert state_of(controller, release) == state
