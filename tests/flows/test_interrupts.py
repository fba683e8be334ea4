"""Ctrl-C in the first half of the main job, and kill -9: nothing is left, and the next run works."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.live import left_behind
from tests.helpers.main_job import (
    MOMENTS,
    check_moment,
    interrupt,
    is_in_a_canary,
    is_training,
    run_job,
    write_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("number", range(MOMENTS // 2))
def test_ctrl_c_at_a_random_moment(
    usual_s: float, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = check_moment(tmp_path, number, usual_s)
    with capsys.disabled():
        print(f"\n  {told}")


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
