"""Ctrl-C at ten random moments of the main job, and kill -9: nothing is left, and the next run works."""

import json
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.base.resident import ensure_base
from engine.settings.params import load_params
from tests.helpers.live import left_behind
from tests.helpers.main_job import interrupt, is_in_a_canary, is_training, run_job, write_job

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(2400)]
MOMENTS = 10
SEED = 11
# What the job says when it begins its last part.
LAST_PART = "Releasing it to users"


@pytest.fixture(scope="module")
def usual_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The seconds of a whole run, from its start, with the base built before."""
    params = write_job(tmp_path_factory.mktemp("whole"))
    settings = load_params(params)
    ensure_base(settings.base, settings.paths)
    return run_job(params)


@pytest.mark.parametrize("number", range(MOMENTS))
def test_ctrl_c_at_a_random_moment(
    usual_s: float, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # One moment in each tenth of the job. A run that is quicker than usual may be in its last part before.
    share = 0.85 * (number + random.Random(SEED + number).random()) / MOMENTS
    log, params, due = tmp_path / "interrupted.log", write_job(tmp_path), time.monotonic() + share * usual_s
    ended = interrupt(params, lambda: time.monotonic() >= due or LAST_PART in log.read_text(), log)
    with capsys.disabled():
        print(f"\n  after {share * usual_s:.1f} of {usual_s:.1f} s: ended within {ended.seconds:.1f} s")
    assert ended.code == 130, log.read_text()[-6000:]
    assert ended.left == []
    run_job(params)
    summary = json.loads((tmp_path / "runs" / "latest.json").read_text())
    assert [policy["verdict"] for policy in summary["policies"]] == ["promote", "promote"]
    assert summary["bad_revision"]["verdict"] == "rollback"


@pytest.mark.parametrize("now", [is_training, is_in_a_canary])
def test_ctrl_c_in_the_training_and_in_a_canary(tmp_path: Path, now: Callable[[Path], bool]) -> None:
    params = write_job(tmp_path)
    ended = interrupt(params, partial(now, params), tmp_path / "interrupted.log")
    assert ended.code == 130, (tmp_path / "interrupted.log").read_text()[-6000:]
    assert ended.left == []


def test_a_start_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Services that are just starting for the first time end by their reapers."""
    params = write_job(tmp_path)
    ended = interrupt(
        params, lambda: len(set(left_behind(tmp_path))) >= 6, tmp_path / "killed.log", signal.SIGKILL
    )
    assert (ended.code, ended.left) == (137, [])
    run_job(params)
