"""A session's journal alone: a late step costs what an early one cost."""

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.training.service.state import Journal

EARLY, LATE = 10, 10_000
RECORD = {"reward": 0.5, "masked": {"outlier": 3}, "text": "x" * 500}
# A late step's numbers have more digits.
DIGITS = 64
ALLOCATED = 4_096


@dataclass(frozen=True)
class Work:
    """What something made this thread do, independently of the machine's speed; files and memory in bytes."""

    calls: int
    written: int
    read: int
    allocated: int


def work_of(action: Callable[[], None]) -> Work:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = transferred()
    # Collections come when they come, and call what others have registered.
    gc.disable()
    tracemalloc.start()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        _, allocated = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.enable()
    after = transferred()
    return Work(calls, after["wchar"] - before["wchar"], after["rchar"] - before["rchar"], allocated)


def transferred() -> dict[str, int]:
    """Return the bytes that this thread's system calls have read and written so far."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def test_the_ten_thousandth_step_costs_what_the_tenth_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    journal, last, found = Journal(tmp_path), None, {}

    def step(number: int) -> None:
        nonlocal last
        result = {"step": number, "grad_norm": 0.5}
        last = journal.append(last, id=f"{number:06d}", result=result, row={**RECORD, **result})
        journal.flush()
        journal.commit()

    for number in range(1, LATE + 1):
        if number in (EARLY, LATE):
            found[number] = work_of(lambda number=number: step(number))
        else:
            step(number)
    early, late = found[EARLY], found[LATE]
    assert late.calls == early.calls
    assert early.written > len(RECORD["text"])
    assert abs(late.written - early.written) <= DIGITS
    assert abs(late.read - early.read) <= DIGITS
    assert late.allocated <= early.allocated + ALLOCATED
    again = Journal(tmp_path)
    again.read(journal.size)
    assert [row["step"] for row in again.rows(last)] == list(range(1, LATE + 1))


@pytest.mark.parametrize("waste", ["rewrites", "reads", "keeps"])
def test_work_that_grows_with_the_steps_is_seen(tmp_path, waste):
    """Of the measure itself: each of these costs in proportion to what came before."""
    file, kept = tmp_path / "file", [RECORD] * 1_000

    def act() -> None:
        if waste == "rewrites":
            file.write_bytes(b"x" * size)
        elif waste == "reads":
            file.read_bytes()
        else:
            str(kept[:size])

    size = 10
    file.write_bytes(b"x" * size)
    early = work_of(act)
    size = 1_000
    file.write_bytes(b"x" * size)
    late = work_of(act)
    grown = {"rewrites": "written", "reads": "read", "keeps": "allocated"}[waste]
    assert getattr(late, grown) > getattr(early, grown) + max(DIGITS, size - 100)
