"""Threads: parallel calls, calls with a time limit, periodic calls, and calls run by a loop's own thread."""

import contextvars
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from engine.errors import ConfigError, GraftworkError, ServiceError

T = TypeVar("T")
log = logging.getLogger(__name__)


def in_parallel(*calls: Callable[[], T]) -> list[T]:
    """Run calls in parallel; return their results in order, or raise the first error once all have ended.

    A `GraftworkError` then carries the messages of the others too. Each call runs in a copy of the caller's
    context, so that a Prefect flow called here stays a subflow. The threads are daemons: an interrupted
    process ends without them.
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
    """Start a call in a daemon thread with a copy of the caller's context; return its future."""
    future: Future[T] = Future()
    run = partial(contextvars.copy_context().run, _settle, future, call)
    threading.Thread(target=run, daemon=True).start()
    return future


def bounded(what: str, limit_s: float, call: Callable[[], T]) -> T:
    """Return what a user's code returns, or raise what it raises; `ConfigError` after `limit_s` seconds.

    Python cannot kill a thread. A late one is sent `SystemExit`, which it raises at its next bytecode; one
    that blocks in C is left behind and costs only its memory. Code that never releases the GIL still blocks
    its caller.
    """
    future: Future[T] = Future()
    thread = threading.Thread(target=_settle, args=(future, call), name=what, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not future.done():
        assert thread.ident
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        raise ConfigError(
            f"The {what} took longer than {limit_s:g} s. Nothing was changed. Make it faster, or raise its "
            "`timeout_s`."
        )
    return future.result()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        # Any error, exits included, is raised where the result is read.
        future.set_exception(error)


class Work:
    """Work in the background that is done by turns. It outlives every error and says each new one once.

    `error` is the last turn's error, `errors` counts them. The age of the last turn that succeeded is a
    metric (`engine.work_metrics`).
    """

    def __init__(self, name: str):
        self.name = name
        self.errors = 0
        # How many turns in a row have failed.
        self.failed = 0
        self.error: Exception | None = None
        self._done_at, self._said = time.monotonic(), ""
        WORKS[name] = self

    @property
    def age_s(self) -> float:
        """Return the seconds since a turn succeeded, or since the work began."""
        return time.monotonic() - self._done_at

    def turn(self, call: Callable[[], object]) -> None:
        """Do one turn."""
        with self.turning():
            call()

    @contextmanager
    def turning(self) -> Iterator[None]:
        """Do one turn in the `with` block."""
        try:
            yield
        except Exception as error:
            # Whatever it calls may fail in any way, and the next turn tries again.
            self.error = error
            self.errors += 1
            self.failed += 1
            if (said := f"{type(error).__name__}: {error}") != self._said:
                log.error("%s failed and is tried again. %s", self.name, said, exc_info=True)
            self._said = said
        else:
            if self._said:
                log.warning("%s works again.", self.name)
            self.error, self.failed, self._done_at, self._said = None, 0, time.monotonic(), ""

    def end(self) -> None:
        """Take the work out of the metrics."""
        if WORKS.get(self.name) is self:
            del WORKS[self.name]


# The work that goes on in this process, by name.
WORKS: dict[str, Work] = {}


class PeriodicThread(threading.Thread):
    """Calls `turn` every `every_s` seconds and on `wake`, until `stop`; first `at_once`, or after them."""

    def __init__(self, name: str, every_s: float, turn: Callable[[], object], at_once: bool = True):
        super().__init__(name=name, daemon=True)
        self.work = Work(name)
        self._every_s, self._turn = every_s, turn
        self._ended, self._due, self._at_once = False, threading.Event(), at_once

    def run(self) -> None:
        """Call `turn` until `stop`; `start` runs this in the thread."""
        if not self._at_once:
            self._due.wait(self._every_s)
        while not self._ended:
            self.work.turn(self._turn)
            self._due.wait(self._every_s)
            self._due.clear()

    def stop(self) -> None:
        """End the thread after the current turn."""
        self._ended = True
        self.work.end()
        self._due.set()

    def wake(self) -> None:
        """Start the next turn now."""
        self._due.set()


class LoopRequests:
    """Calls that other threads hand to a loop's thread, which alone may touch the loop's state."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run `work` in the loop's thread; return its result or raise its error.

        Raises `ServiceError` after `timeout_s`; work that has started goes on.
        """
        future: Future[T] = Future()
        self._waiting.put((work, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise ServiceError(
                f"It was not done within {timeout_s:.0f} s. Check `graftwork status`, then ask again."
            ) from None

    def run_waiting(self) -> None:
        """Run the waiting calls; an error goes to the caller."""
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
                # The caller raises it; an exit or an interrupt ends the loop itself.
                future.set_exception(error)
