"""Threads: calls side by side, calls with a time limit, and work asked of a loop's own thread."""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine.errors import GraftworkError

T = TypeVar("T")


def in_parallel(*calls: Callable[[], T]) -> list[T]:
    """Return the results in the order of the calls; raise the first one's error when all have ended.

    An error for a person then says what went wrong with the others too.
    Each call sees the caller's context, so that a flow that is called here stays a part of its
    caller. The threads are daemons: after an interrupt the process ends without them.
    """
    futures = [background(call) for call in calls]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        if isinstance(errors[0], GraftworkError):
            told = dict.fromkeys(str(error) for error in errors if isinstance(error, GraftworkError))
            errors[0].args = (" ".join(told), *errors[0].args[1:])
        raise errors[0]
    return [future.result() for future in futures]


def background(call: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread with the caller's context."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return future
