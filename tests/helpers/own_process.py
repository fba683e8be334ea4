"""Measurements in a process of their own, which has no other threads.

`tracemalloc` must not stop while another thread allocates (CPython issue 128679): the process may then hang
or crash, and a test's process has threads of libraries and of services.
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

LIMIT_S = 240.0
Result = TypeVar("Result")


def in_own_process(call: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function of a helper module returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result(LIMIT_S)


def peak_of(action: Callable[[], object]) -> int:
    """Return the most bytes that Python held of what an action allocated; only in a process of its own."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@dataclass(frozen=True)
class Work:
    """What something made this thread do, independently of the machine's speed; files and memory in bytes."""

    calls: int
    written: int
    read: int
    allocated: int


def work_of(action: Callable[[], None]) -> Work:
    """Return the work of an action; only in a process of its own."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def counted() -> None:
        sys.setprofile(count)
        try:
            action()
        finally:
            sys.setprofile(None)

    before = transferred()
    # Collections come when they come, and call what others have registered.
    gc.disable()
    try:
        allocated = peak_of(counted)
    finally:
        gc.enable()
    after = transferred()
    return Work(calls, after["wchar"] - before["wchar"], after["rchar"] - before["rchar"], allocated)


def transferred() -> dict[str, int]:
    """Return the bytes that this thread's system calls have read and written so far."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
