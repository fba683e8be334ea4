"""kill -9 of engine, trainer and flow process at random moments: a run ends as if nothing had happened."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.base.resident import ensure_base
from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.services import lifecycle as services
from engine.settings.params import Params, load_params
from tests.helpers.chaos import (
    Flow,
    Kill,
    Note,
    assert_whole,
    durations,
    interrupted,
    plans,
    revisions,
)
from tests.helpers.live import free_port, left_behind
from tests.helpers.operated import write_settings

pytestmark = [pytest.mark.slow, pytest.mark.services]
STEPS = 10
RUNS = 10
# A killed engine takes 40 s to come back, a flow 30 s (its lease), a trainer 10 s.
VICTIMS = ("engine", "flow", "flow", "trainer", "trainer")
SEED = 20
RECIPE = {"task": "addition", "contract": "terse", "suite": "addition-terse", "steps": STEPS, "groups": 8}
BESIDE = ("beside-0", "beside-1")
# On-policy, and with the samples of a step drawn while the one before it is learned.
STALENESS = (0, 1)


@dataclass(frozen=True)
class Whole:
    """An undisturbed run: each phase's usual seconds, and the digest after each step."""

    usual: dict[str, float]
    digests: dict[int, str]


@dataclass(frozen=True)
class Live:
    """Engine and trainer under their supervisor, and the undisturbed run of each staleness."""

    params: Params
    file: Path
    found: dict[int, Whole]

    def whole(self, staleness: int) -> Whole:
        if staleness not in self.found:
            flow = Flow(self.file, f"whole-{staleness}")
            flow.finish()
            digests = revisions(self.params, flow.policy)
            assert_whole(self.params, flow.policy, STEPS, digests)
            self.found[staleness] = Whole(durations(Note.read(flow.notes)), digests)
        return self.found[staleness]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    state = tmp_path_factory.mktemp("chaos")
    policies: dict[str, dict] = dict.fromkeys(("sample", "among", *BESIDE), RECIPE)
    for number in range(RUNS):
        policies[f"run-{number}"] = RECIPE | {"staleness": STALENESS[number % len(STALENESS)]}
    for staleness in STALENESS:
        policies[f"whole-{staleness}"] = RECIPE | {"staleness": staleness}
    # Several policies may share a pass, which rounds in another order: the check is equal digests.
    trainer = {"port": free_port(), "fuse": "never"}
    file = write_settings(state, policies=policies, trainer=trainer)
    params = load_params(file)
    migrate(params.paths.catalog_url)
    catalog = whole_catalog(params.paths.catalog_url)
    catalog.keys.ensure_local(params.paths.local_key)
    catalog.close()
    with services.session(
        params, lambda: ensure_base(params.base, params.paths), lambda *_: None, ("engine", "trainer")
    ):
        yield Live(params, file, {})
    assert left_behind(state) == []


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Return a way to show lines also when the test passes: which moments were hit is part of the result."""

    def show(*lines: str) -> None:
        with capsys.disabled():
            print("", *lines, sep="\n  ")

    return show


def survives(live: Live, policy: str, kills: list[Kill], tell: Callable[..., None]) -> None:
    whole = live.whole(live.params.policy(policy).staleness)
    began = time.monotonic()
    digest, hits = interrupted(live.params, live.file, policy, kills, whole.usual)
    tell(f"{policy}: {time.monotonic() - began:.0f} s", *hits)
    assert digest == whole.digests[STEPS]
    assert_whole(live.params, policy, STEPS, whole.digests)
    assert len(hits) == len(kills)


@pytest.mark.timeout(900)
def test_one_kill_of_each_process(live: Live, tell: Callable[..., None]) -> None:
    """The flow's lease runs out while the engine starts again."""
    kills = [
        Kill("engine", 2, "rollouts", 0.2),
        Kill("flow", 2, "rollouts", 0.9),
        Kill("trainer", 5, "optim_step", 0.5),
    ]
    survives(live, "sample", kills, tell)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", range(RUNS))
def test_kills_at_random_moments(live: Live, number: int, tell: Callable[..., None]) -> None:
    survives(live, f"run-{number}", plans(SEED, VICTIMS, STEPS, RUNS)[number], tell)


@pytest.mark.timeout(1500)
def test_kills_with_three_policies_at_once(live: Live, tell: Callable[..., None]) -> None:
    """One recipe, so one digest: whoever is killed, and whoever only waits beside it."""
    whole = live.whole(0)
    flows = [Flow(live.file, policy) for policy in BESIDE]
    try:
        survives(live, "among", plans(SEED + 1, VICTIMS, STEPS, 1)[0], tell)
        for flow in flows:
            assert flow.finish() == whole.digests[STEPS]
            assert_whole(live.params, flow.policy, STEPS, whole.digests)
    finally:
        for flow in flows:
            flow.process.kill()
