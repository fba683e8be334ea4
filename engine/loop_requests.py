"""Work that other threads ask of a loop's thread, which alone may touch what it owns."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from engine.errors import ServiceError

Result = TypeVar("Result")


class Asked:
    """A line of work, carried out when the loop comes by."""

    def __init__(self) -> None:
        self._line: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    def ask(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return what the loop's thread made of `work`, or raise what it raised.

        Raises `ServiceError` when that takes longer; work that has begun then goes on.
        """
        future: Future[Result] = Future()
        self._line.put((work, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise ServiceError(
                f"It was not done within {timeout_s:.0f} s. See `graftwork status`, then ask again."
            ) from None

    def carry_out(self) -> None:
        """Do what is in the line; a fault is the asker's."""
        while True:
            try:
                work, future = self._line.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
