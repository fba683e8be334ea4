"""Ctrl-C at ten random moments of the main job: nothing is left behind, and the next run works."""

import json
import random
import time
from functools import partial
from pathlib import Path

import pytest

from engine.base.resident import ensure_base
from engine.settings.params import load_params
from tests.helpers.main_job import interrupt, is_in_a_canary, run_job, write_job

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(2400)]
MOMENTS = 10
SEED = 11


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
    # One moment in each tenth of the job; of its last part, by which a quicker run has ended, none.
    share = 0.85 * (number + random.Random(SEED + number).random()) / MOMENTS
    params, due = write_job(tmp_path), time.monotonic() + share * usual_s
    ended = interrupt(params, lambda: time.monotonic() >= due, tmp_path / "interrupted.log")
    with capsys.disabled():
        print(f"\n  after {share * usual_s:.1f} of {usual_s:.1f} s: ended within {ended.seconds:.1f} s")
    assert ended.code == 130, (tmp_path / "interrupted.log").read_text()[-6000:]
    assert ended.left == []
    run_job(params)
    summary = json.loads((tmp_path / "runs" / "latest.json").read_text())
    assert [policy["verdict"] for policy in summary["policies"]] == ["promote", "promote"]
    assert summary["bad_revision"]["verdict"] == "rollback"


def test_ctrl_c_in_a_canary(tmp_path: Path) -> None:
    params = write_job(tmp_path)
    ended = interrupt(params, partial(is_in_a_canary, params), tmp_path / "interrupted.log")
    assert ended.code == 130, (tmp_path / "interrupted.log").read_text()[-6000:]
    assert ended.left == []
