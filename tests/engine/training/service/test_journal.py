"""A session's journal alone: a late step costs what an early one cost."""

from pathlib import Path

import pytest

from engine.training.service.state import Journal
from tests.helpers.measured_work import RECORD, work_of_steps, work_of_waste
from tests.helpers.own_process import in_own_process

EARLY, LATE = 10, 10_000
# A late step's numbers have more digits.
DIGITS = 64
ALLOCATED = 4_096


@pytest.mark.long
def test_the_ten_thousandth_step_costs_what_the_tenth_cost(tmp_path: Path) -> None:
    early, late, size, last = in_own_process(work_of_steps, tmp_path, EARLY, LATE)
    assert late.calls == early.calls
    assert early.written > len(RECORD["text"])
    assert abs(late.written - early.written) <= DIGITS
    assert abs(late.read - early.read) <= DIGITS
    assert late.allocated <= early.allocated + ALLOCATED
    again = Journal(tmp_path)
    again.read(size)
    assert [row["step"] for row in again.rows(last)] == list(range(1, LATE + 1))


@pytest.mark.parametrize("waste", ["rewrites", "reads", "keeps"])
def test_work_that_grows_with_the_steps_is_seen(tmp_path: Path, waste: str) -> None:
    """Of the measure itself: each of these costs in proportion to what came before."""
    sizes = 10, 1_000
    early, late = in_own_process(work_of_waste, tmp_path / "file", waste, sizes)
    grown = {"rewrites": "written", "reads": "read", "keeps": "allocated"}[waste]
    assert getattr(late, grown) > getattr(early, grown) + max(DIGITS, sizes[1] - 100)
