"""Ctrl-C in the second half of the main job: nothing is left, and the next run works."""

from pathlib import Path

import pytest

from tests.helpers.main_job import MOMENTS, check_moment

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("number", range(MOMENTS // 2, MOMENTS))
def test_ctrl_c_at_a_random_moment(
    usual_s: float, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = check_moment(tmp_path, number, usual_s)
    with capsys.disabled():
        print(f"\n  {told}")
