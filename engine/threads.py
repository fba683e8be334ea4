"""Threads: calls side by side, with a time limit, again and again, and work asked of a loop's own thread."""

import contextvars
import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from engine.errors import ConfigError, GraftworkError, ServiceError

T = TypeVar("T")
log = logging.getLogger(__name__)


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
    run = partial(contextvars.copy_context().run, _settle, future, call)
    threading.Thread(target=run, daemon=True).start()
    return future


def bounded(what: str, limit_s: float, call: Callable[[], T]) -> T:
    """Return what a person's code returns, or raise what it raises; `ConfigError` when it takes longer.

    Python ends no thread from outside. One that is late is told to end by an exception, which it meets at
    its next line of Python; one that waits in C for ever is left behind, where it costs nothing but its
    memory. Only code that never gives Python's lock back could still hold its caller.
    """
    future: Future[T] = Future()
    thread = threading.Thread(target=_settle, args=(future, call), name=what, daemon=True)
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


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        # Whatever it is, it is raised where the result is asked for.
        future.set_exception(error)


class PeriodicThread(threading.Thread):
    """Calls `turn` every `every_s` seconds and when it is woken, until `stop`; `error` is the last turn's."""

    def __init__(self, name: str, every_s: float, turn: Callable[[], object]):
        super().__init__(name=name, daemon=True)
        self.error: Exception | None = None
        self._every_s, self._turn = every_s, turn
        self._ended, self._due = False, threading.Event()

    def run(self) -> None:
        while not self._ended:
            try:
                self._turn()
                self.error = None
            except Exception as error:
                # A turn asks other services: the thread outlives whatever they answer, and asks again.
                self.error = error
                log.debug(self.name, exc_info=True)
            self._due.wait(self._every_s)
            self._due.clear()

    def stop(self) -> None:
        """Make this turn the last."""
        self._ended = True
        self._due.set()

    def wake(self) -> None:
        """Make the next turn now."""
        self._due.set()


class LoopRequests:
    """Calls that other threads ask of a loop's thread, which alone may touch what it owns."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Return what the loop's thread made of `work`, or raise what it raised.

        Raises `ServiceError` when that takes longer; work that has begun then goes on.
        """
        future: Future[T] = Future()
        self._waiting.put((work, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise ServiceError(
                f"It was not done within {timeout_s:.0f} s. See `graftwork status`, then ask again."
            ) from None

    def run_waiting(self) -> None:
        """Make the calls that wait; a fault goes to whoever asked."""
        while True:
            try:
                work, future = self._waiting.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                # As above; an exit or an interrupt is the loop's own.
                future.set_exception(error)
