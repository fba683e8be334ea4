"""The trainer's queue: one thread, one line of operations a session, round robin between lines.

Brief operations go first, within a limit. The queue bounds how many operations wait, and cancels them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from engine.errors import Busy, Cancelled, Conflict, NotFound, ServiceError
from engine.training.service.protocol import Request

# Finished operations that stay known: of each session, and in total.
KEPT = 16
KEPT_OF_ALL = 512
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 30.0
# Brief operations that may overtake a long one in a row.
BRIEF_IN_A_ROW = 8
# How long a long operation waits for the operation that ends the previous session's step.
LINGER_S = 0.02
# After a wait in vain, so many are skipped: the client may be slow, or only gather gradients.
SKIPPED = 8
# Lines for which skips are remembered.
REMEMBERED = 1024
# Weight of the newest operation in the mean duration.
NEWEST = 0.2

Work = Callable[[Any], Any]


@dataclass(eq=False)
class Operation:
    """One request and its future result; `line` is its session.

    `can_stop`: it checks `stop` while it runs. `can_join`: it may run together with others of this kind from
    other lines. `brief`: it goes before long operations of other lines. `leads`: another operation of its
    line follows soon. The request is released when the operation ends, since its data may be large.
    """

    request: Request | None
    line: str
    work: Work
    can_stop: bool = False
    can_join: bool = False
    brief: bool = False
    leads: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    future: "Future[Any]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        assert self.request
        self.id, self.fence = self.request.request_id, getattr(self.request, "fence", None)
        # What makes it this request and no other; a hash is valid in this process only.
        text = self.request.model_dump_json(exclude={"fence", "gathered"})
        self.content = hash((type(self.request), text))

    def go_on(self) -> None:
        """Raise `Cancelled` once the operation is cancelled."""
        if self.stop.is_set():
            raise Cancelled(f"The operation {self.id!r} was cancelled while it ran.")

    def perform(self) -> None:
        """Do the work and set the future's result or error."""
        try:
            self.future.set_result(self.work(self.request))
        except BaseException as error:
            # A custom loss may raise even `SystemExit`; the queue's thread must survive.
            self.future.set_exception(error)


def joined(first: Sequence[Operation]) -> Sequence[Operation]:
    """Choose the first operation and, if it can join, all others that can.

    `first` holds each line's first operation, in turn order.
    """
    return [one for one in first if one.can_join] if first[0].can_join else first[:1]


class Queue:
    """Operations of many sessions. Within a session first in, first out; between sessions round robin.

    Brief operations end a step, after which the policy samples again. In plain round robin they would wait
    for the gradients of every other policy: all policies would sample, then all learn. After an operation
    that `leads`, others wait a moment for its successor (anticipatory scheduling, Iyer & Druschel, SOSP
    2001).

    `choose` gets the first operation of every line in turn order and returns those that `perform` carries out
    together. A request's id is its operation's id: a repeated request joins the operation that waits, runs or
    is done, and restarts one that failed. At most `of_line` operations of a session wait, `of_all` in total.
    """

    def __init__(
        self,
        of_line: int,
        of_all: int,
        perform: Callable[[Sequence[Operation]], None],
        choose: Callable[[Sequence[Operation]], Sequence[Operation]] = joined,
    ):
        self.of_line, self.of_all, self.choose, self.perform = of_line, of_all, choose, perform
        # In turn order: a served line goes to the end.
        self._lines: dict[str, deque[Operation]] = {}
        self._brief_served = 0
        self._running: Sequence[Operation] = ()
        self._before: Sequence[Operation] = ()
        self._ended_at = 0.0
        # How often not to linger again, by line and by whether the last operation was brief.
        self._skips: dict[tuple[str, bool], int] = {}
        self._known: dict[str, Operation] = {}
        self._done: deque[Operation] = deque()
        self._mean_s, self._began, self._closed = SHORTEST_WAIT_S, 0.0, False
        self.refused = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="trainer", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> str:
        """Queue an operation and return its id.

        Raises `Busy` with the queue's state when it is full, `Conflict` when the id belongs to another
        request.
        """
        id, line = operation.id, operation.line
        with self._changed:
            earlier = self._known.get(id)
            if earlier is None or _failed(earlier.future):
                self._refuse_when_full(line)
                self._known[id] = operation
                self._lines.setdefault(line, deque()).append(operation)
                self._changed.notify()
            elif earlier.content != operation.content:
                raise Conflict(
                    f"The request id {id!r} was used before for a different request. Give each request its "
                    "own id."
                )
        return id

    def operation(self, id: str) -> Operation:
        """Return a known operation; `NotFound` otherwise."""
        if id not in self._known:
            raise NotFound(
                f"There is no operation {id!r}; the trainer may have restarted. Send the request again."
            )
        return self._known[id]

    def cancel(self, id: str) -> None:
        """Cancel an operation: at once while it waits, before its next part while it runs.

        Raises `Conflict` when it has begun and cannot stop. A finished operation stays finished.
        """
        operation = self.operation(id)
        with self._changed:
            line = self._lines.get(operation.line, deque())
            if operation in line:
                line.remove(operation)
                if not line:
                    del self._lines[operation.line]
                self._finish(operation, Cancelled(f"The operation {id!r} was cancelled before it began."))
            elif not operation.can_stop and not operation.future.done():
                raise Conflict(f"The operation {id!r} has begun and cannot be cancelled; wait for it.")
            operation.stop.set()

    def state(self, line: str) -> dict[str, Any]:
        """Return the number of waiting operations and the estimated wait, in seconds, of a new one."""
        with self._changed:
            return self._state(line, len(self._lines.get(line, ())))

    def place(self, id: str) -> dict[str, Any]:
        """Return the queue's state for an unfinished operation; `position` 0 means that it runs."""
        with self._changed:
            operation = self.operation(id)
            line = self._lines.get(operation.line, deque())
            if operation not in line:
                return {"position": 0, **self._counts(operation.line), "estimated_wait_s": 0.0}
            return self._state(operation.line, line.index(operation))

    @property
    def unfinished(self) -> int:
        """Return how many operations wait or run."""
        return sum(map(len, list(self._lines.values()))) + len(self._running)

    def waiting(self, line: str) -> int:
        """Return the number of waiting operations of a session."""
        return len(self._lines.get(line, ()))

    def close(self) -> None:
        """Stop after the running operation; waiting ones fail and can be sent again."""
        with self._changed:
            self._closed = True
            for operation in [one for line in self._lines.values() for one in line]:
                operation.future.set_exception(
                    ServiceError("The trainer is stopping. Send the request again when it is back.")
                )
            self._lines.clear()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while chosen := self._next():
            self.perform(chosen)
            self._ended(chosen)

    def _next(self) -> Sequence[Operation]:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            self._linger()
            # Waiting operations may have been cancelled meanwhile.
            self._changed.wait_for(lambda: self._lines or self._closed)
            if self._closed:
                return ()
            briefs = {name: line[0].brief for name, line in self._lines.items()}
            brief_first, self._brief_served = turn(briefs.values(), self._brief_served)
            order = sorted(briefs, key=lambda name: briefs[name] != brief_first)
            chosen = self.choose([self._lines[name][0] for name in order])
            for operation in chosen:
                line = self._lines.pop(operation.line)
                line.popleft()
                if line:
                    self._lines[operation.line] = line
            self._running, self._began = chosen, time.monotonic()
            return chosen

    def _linger(self) -> None:
        """Wait a moment for the successor of the last operations, unless it or a brief one already waits."""
        left_s = self._ended_at + LINGER_S - time.monotonic()
        if left_s <= 0:
            return
        leads = [(one.line, one.brief) for one in self._before if one.leads]
        expected = [key for key in leads if not self._skips.get(key)]
        for key in leads:
            if key not in expected:
                self._skips[key] -= 1
        if not expected or self._changed.wait_for(partial(self._came, expected), left_s):
            return
        if len(self._skips) > REMEMBERED:
            self._skips.clear()
        self._skips |= dict.fromkeys(expected, SKIPPED)

    def _came(self, expected: Sequence[tuple[str, bool]]) -> bool:
        brief = any(line[0].brief for line in self._lines.values())
        return self._closed or brief or any(line in self._lines for line, _ in expected)

    def _ended(self, chosen: Sequence[Operation]) -> None:
        with self._changed:
            seconds = (time.monotonic() - self._began) / len(chosen)
            self._mean_s += NEWEST * (seconds - self._mean_s)
            self._running, self._before, self._ended_at = (), chosen, time.monotonic()
            for operation in chosen:
                self._remember(operation)

    def _finish(self, operation: Operation, error: Exception) -> None:
        operation.future.set_exception(error)
        self._remember(operation)

    def _remember(self, operation: Operation) -> None:
        operation.request = None
        self._done.append(operation)
        same = [one for one in self._done if one.line == operation.line]
        if len(same) > KEPT or len(self._done) > KEPT_OF_ALL:
            oldest = same[0] if len(same) > KEPT else self._done[0]
            self._done.remove(oldest)
            if self._known.get(oldest.id) is oldest:
                del self._known[oldest.id]

    def _refuse_when_full(self, line: str) -> None:
        mine, waiting = len(self._lines.get(line, ())), sum(map(len, self._lines.values()))
        if mine < self.of_line and waiting < self.of_all:
            return
        self.refused += 1
        # A place becomes free after this session's next turn, or after any turn.
        turns = len(self._lines) if mine >= self.of_line else 1
        wait_s = min(max(turns * self._mean_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)
        raise Busy(
            f"The trainer's queue is full: {mine} operations of this session wait (at most {self.of_line}), "
            f"{waiting} in total (at most {self.of_all}). Send the request again in {wait_s:.1f} s.",
            wait_s,
            {"queue_state": "paused_rate_limit", **self._state(line, mine)},
        )

    def _state(self, line: str, before: int) -> dict[str, Any]:
        """Return the state for an operation with `before` others ahead of it in its line."""
        waiting = {name: deque(one.brief for one in line) for name, line in self._lines.items()}
        # Assume that a new operation is long.
        waiting.setdefault(line, deque()).append(False)
        served = _turns(waiting, self._brief_served)
        mine = (place for place, name in enumerate(served, 1) if name == line)
        position = next(islice(mine, before, None))
        spent = time.monotonic() - self._began if self._running else self._mean_s
        wait_s = max((position - 1) * self._mean_s + max(self._mean_s - spent, 0.0), 0.0)
        return {"position": position, **self._counts(line), "estimated_wait_s": round(wait_s, 3)}

    def _counts(self, line: str) -> dict[str, int]:
        waiting = sum(map(len, self._lines.values()))
        return {"queued": waiting, "queued_of_session": len(self._lines.get(line, ()))}


def turn(briefs: Collection[bool], served: int) -> tuple[bool, int]:
    """Return whether a brief operation is next, and how many brief ones have then overtaken a long one.

    `briefs` says for each line whether its first operation is brief; `served` is the count so far.
    """
    if all(briefs):
        return True, 0
    is_brief = any(briefs) and served < BRIEF_IN_A_ROW
    return is_brief, served + 1 if is_brief else 0


def _turns(lines: dict[str, deque[bool]], served: int) -> Iterator[str]:
    """Yield the lines in the order in which their operations will be served; consumes `lines`."""
    while lines:
        is_brief, served = turn([line[0] for line in lines.values()], served)
        first = next(name for name, line in lines.items() if line[0] == is_brief)
        yield first
        line = lines.pop(first)
        line.popleft()
        if line:
            lines[first] = line


def _failed(future: "Future[Any]") -> bool:
    return future.done() and future.exception() is not None and not isinstance(future.exception(), Cancelled)
