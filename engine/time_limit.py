"""A call of a person's code with a limit to its time: whatever it does, whoever called goes on.

It runs in a thread of its own, and Python ends no thread from outside. One that is late is told to end by an
exception, which it meets at its next line of Python; one that waits in C for ever is left behind, where it
costs nothing but its memory. Only code that never gives Python's lock back could still hold its caller.
"""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine.errors import ConfigError

T = TypeVar("T")


def bounded(what: str, limit_s: float, call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises; `ConfigError` when it takes longer."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not future.done():
        assert thread.ident
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        raise ConfigError(
            f"The {what} took longer than {limit_s:g} s. Nothing was changed; mend it, or raise its "
            "`timeout_s`."
        )
    return future.result()
