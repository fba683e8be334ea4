"""A wall clock that is set back or forward by ten minutes, of the controller or of a gateway."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.catalog.catalog import Catalog, Release, migrate
from engine.controller.__main__ import whole_controller
from engine.controller.evidence import EvidenceReader
from engine.controller.release_loop import Controller
from engine.ledger.ledger import Ledger
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.canary_users import Users
from tests.helpers.rows import NEW, OLD, fill

JUMP_S = 600.0
REAL = time.time
# By how much the controller's clock and the gateways' jump.
JUMPS = {
    "the machine's back": (-JUMP_S, -JUMP_S),
    "the machine's forward": (JUMP_S, JUMP_S),
    "the controller's back": (-JUMP_S, 0.0),
    "the controller's forward": (JUMP_S, 0.0),
    "the gateway's back": (0.0, -JUMP_S),
    "the gateway's forward": (0.0, JUMP_S),
}
# One of each two in `make test`.
LONG = ("the machine's forward", "the controller's back", "the gateway's back")
MOMENTS = ("created", "in its canary", "restarted in its canary")


class Clocks:
    """The wall clocks: `time.time` is the controller's."""

    def __init__(self) -> None:
        self.controller_s, self.gateway_s = 0.0, 0.0

    def jump(self, controller_s: float, gateway_s: float) -> None:
        self.controller_s, self.gateway_s = controller_s, gateway_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(time, "time", lambda: REAL() + clocks.controller_s)
    return clocks


@pytest.fixture
def params(tmp_path: Path) -> Params:
    return Params(state_dir=tmp_path / "state", release=ReleaseConfig(min_units=10))


@pytest.fixture
def controller(params: Params, clocks: Clocks) -> Iterator[Controller]:
    migrate(params.paths.catalog_url)
    catalog = Catalog(params.paths.catalog_url)
    fill(catalog)
    catalog.close()
    controller = whole_controller(params, "test")
    yield controller
    controller.close()


@pytest.fixture
def users(params: Params, clocks: Clocks) -> Users:
    return Users(params, lambda: REAL() + clocks.gateway_s)


def start(controller: Controller, **settings: float) -> Release:
    return controller.decisions.start("sorting", NEW, settings, {"score": "not scored here"}, "me")


def state_of(controller: Controller, release: Release) -> tuple[str, str]:
    found = controller.catalog.releases.get(release.id)
    return found.state, found.step


def restarted(controller: Controller) -> Controller:
    """Return another controller in this one's place; the fixture closes it instead."""
    controller.close()
    again = whole_controller(controller.params, "test")
    vars(controller).update(vars(again))
    return controller


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "jump", [pytest.param(jump, marks=pytest.mark.slow if jump in LONG else ()) for jump in JUMPS]
)
@pytest.mark.parametrize(("reward", "pairs", "state"), [(0.0, 8, "rolled_back"), (1.0, 60, "promoted")])
def test_a_canary_is_judged_as_if_no_clock_had_jumped(
    controller: Controller,
    users: Users,
    clocks: Clocks,
    jump: str,
    moment: str,
    reward: float,
    pairs: int,
    state: str,
) -> None:
    controller.tick()
    release = start(controller)
    if moment == "created":
        clocks.jump(*JUMPS[jump])
    controller.tick()
    assert controller.catalog.routes.get("sorting").canary == NEW
    if moment != "created":
        clocks.jump(*JUMPS[jump])
    if moment.startswith("restarted"):
        controller = restarted(controller)
    users.crowd(canary=reward, baseline=1.0, pairs=pairs)
    controller.tick()
    assert state_of(controller, release) == (state, "done")
    assert controller.catalog.releases.get(release.id).evidence["canary"]["canary_units"] == pairs
    route = controller.catalog.routes.get("sorting")
    assert (route.champion, route.canary) == (NEW if state == "promoted" else OLD, None)


@pytest.mark.parametrize("jump_s", [-JUMP_S, JUMP_S])
@pytest.mark.parametrize(
    ("settings", "step", "reason"),
    [({"max_s": 100}, "canary", "No verdict"), ({"approval_s": 100}, "approval", "Nobody approved")],
)
def test_a_step_lasts_as_long_as_it_may(
    controller: Controller, clocks: Clocks, jump_s: float, settings: dict[str, float], step: str, reason: str
) -> None:
    steady = [0.0]
    controller.reader = EvidenceReader(controller.catalog, lambda: steady[0])
    controller.tick()
    release = start(controller, **settings)
    controller.tick()
    clocks.jump(jump_s, jump_s)
    for now in (0.0, 99.9):
        steady[0] = now
        controller.tick()
        assert state_of(controller, release) == ("running", step)
    steady[0] = 100.0
    controller.tick()
    assert state_of(controller, release) == ("held", "done")
    assert controller.catalog.releases.get(release.id).reason.startswith(reason)


@pytest.mark.parametrize("jump_s", [-JUMP_S, JUMP_S])
def test_a_release_waits_for_scores_spooled_before_it(
    controller: Controller, users: Users, clocks: Clocks, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    controller.tick()
    fields = {"policy": "sorting", "base": "base", "suite": "sorting-json", "suite_version": "1"}
    for digest in (OLD, NEW):
        users.spool.emit("scores", digest=digest, item="a", score=1.0, **fields)
    users.spool.rotate()
    clocks.jump(jump_s, jump_s)
    release = controller.decisions.start("sorting", NEW, {}, {}, "me")
    with monkeypatch.context() as disk:
        disk.setattr(Ledger, "ingest", full)
        controller.tick()
    assert state_of(controller, release) == ("running", "probe")
    controller.tick()
    assert state_of(controller, release) == ("running", "canary")
