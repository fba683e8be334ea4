"""kill -9 of the evaluators' process, the controller and the engine during a shadow with users asking."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.helpers.chaos import await_return, processes_of, reaper_of
from tests.helpers.evaluated import SPENT, Live, Users, installation
from tests.helpers.live import eventually

# An engine starts, and starts again.
pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(900)]
# Scores all answers alike, and takes its time as long as there is a file `brake` beside it.
ALIKE = """
import time
from pathlib import Path

def score(question, answers, context):
    if Path(__file__).with_name("brake").exists():
        time.sleep(0.5)
    return [0.5 for _ in answers]
"""
TWICE = """
    SELECT count(*) FROM (SELECT 1 FROM evaluations WHERE score IS NOT NULL
        GROUP BY release, request, evaluator, version HAVING count(*) > 1
        UNION ALL SELECT 1 FROM shadows GROUP BY release, unit HAVING count(*) > 1)
"""


@dataclass
class Braked:
    """The installation, and the file that makes its evaluator slow."""

    live: Live
    brake: Path


@pytest.fixture(scope="module")
def braked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Braked]:
    state = tmp_path_factory.mktemp("kills")
    with installation(state, ALIKE, (1.0, -1.3, 0.7)) as live:
        live.set_champion(live.digests[0])
        yield Braked(live, state / "brake")


def question(number: int) -> str:
    return f"What is {number} + {number % 7}?"


def have_ended(processes: Sequence[psutil.Process]) -> bool:
    """Return whether none of them runs: what its reaper has not taken note of yet is a zombie."""
    _, alive = psutil.wait_procs(processes, timeout=0)
    return all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


def goes_on(live: Live, release: str) -> bool:
    """Return whether scores of a release still come."""
    before = live.scores(release)
    return eventually(lambda: live.scores(release) > before + 2, 60)


def test_kills_of_evaluators_controller_and_engine_lose_and_double_nothing(braked: Braked) -> None:
    live = braked.live
    braked.brake.touch()
    with Users(live, question) as users:
        release = live.start(live.digests[1], {}, shadow=1_000_000)
        assert eventually(lambda: live.scores(release) >= 4, 60)

        killed, functions = live.evaluator()
        assert [one.nice() for one in (killed, *functions)] == [10, 10]
        killed.kill()
        assert eventually(lambda: have_ended(functions))
        assert goes_on(live, release)

        alone, functions = live.evaluator()
        assert alone.pid != killed.pid
        gone = reaper_of(live.params, "controller")
        processes_of(live.params, "controller")[0].kill()
        assert eventually(lambda: have_ended([alone, *functions]))
        await_return(live.params, "controller", gone)
        assert goes_on(live, release)
        assert len(live.evaluators()) == 1
        assert [one.fault for one in users.asked if one.fault] == []

        gone, killed_at = reaper_of(live.params, "engine"), time.monotonic()
        processes_of(live.params, "engine")[0].kill()
        await_return(live.params, "engine", gone)
        back_at = time.monotonic()
        assert goes_on(live, release)
        assert live.controller.release(release)["step"] == "shadow"

        braked.brake.unlink()
        ended = live.controller.wait_for_verdict(release, 240)
    assert (ended["state"], ended["evidence"]["verdict"]) == ("promoted", "promote"), ended["reason"]
    assert [one for one in users.asked if one.fault and (one.ended < killed_at or one.sent > back_at)] == []
    assert sum(one.sent > back_at for one in users.asked) > 20
    assert live.row(TWICE) == (0,)
    assert eventually(lambda: not live.evaluators())


def test_a_budget_counts_what_was_spent_before_a_kill(braked: Braked) -> None:
    live, budget = braked.live, 6.0
    braked.brake.touch()
    with Users(live, question):
        release = live.start(live.digests[2], {"budget": budget}, shadow=1_000_000)
        assert eventually(lambda: live.row(SPENT, release)[0] > budget / 2, 60)
        live.evaluator()[0].kill()
        assert eventually(lambda: live.row(SPENT, release)[0] >= budget, 60)
        time.sleep(3)
        spent = live.row(SPENT, release)
        time.sleep(3)
        assert live.row(SPENT, release) == spent
    # The last call may begin right before the end of the budget, and one be on its way to the ledger.
    assert budget <= spent[0] < budget + 1.5
    live.controller.hold(release, "The budget is spent.", "me")
    assert live.row(TWICE) == (0,)
