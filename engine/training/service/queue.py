"""The trainer's queue: one thread, a line for each session, a turn for each line, brief operations between.

Knows operations, their order, how many may wait and how one is called off. Knows nothing of what they do.
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

# Results that a client may still ask for: of each session, and of all.
KEPT = 16
KEPT_OF_ALL = 512
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 30.0
# Brief operations that may come, one after another, before a long one whose turn it is, whatever they take.
BRIEF_IN_A_ROW = 8
# How long a long operation waits for what ends the step of the session that was served before.
LINGER_S = 0.02
# Where that was in vain, so often it is not tried again: a client may be slow, or only gather gradients.
SKIPPED = 8
# Lines that this is remembered of.
REMEMBERED = 1024
# How much of the mean duration the newest operation makes up.
NEWEST = 0.2

Work = Callable[[Any], Any]


@dataclass(eq=False)
class Operation:
    """One request and its result to come; `line` is its session. One that `can_stop` looks at `stop`.

    One that `can_join` may be carried out together with such of other lines. A `brief` one goes before the
    long ones of other lines, one that `leads` is soon followed by another of its line. The request is given
    up when the operation ends: its data may be large.
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
        self.content = self.request.content()

    def go_on(self) -> None:
        """Raise `Cancelled` once the operation was called off."""
        if self.stop.is_set():
            raise Cancelled(f"The operation {self.id!r} was cancelled while it ran.")

    def perform(self) -> None:
        """Do the work; its result or its error goes to whoever waits."""
        try:
            self.future.set_result(self.work(self.request))
        except BaseException as error:
            # `SystemExit` too, which a loss of one's own may raise: the one thread goes on.
            self.future.set_exception(error)


def alone(first: Sequence[Operation]) -> Sequence[Operation]:
    """Take turns: of the first operation of every line, in the order of their turns, the first one."""
    return first[:1]


def joined(first: Sequence[Operation]) -> Sequence[Operation]:
    """Take the first one, and if it can join others, all that can: none waits for longer than in turns."""
    return [one for one in first if one.can_join] if first[0].can_join else first[:1]


def perform_each(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.perform()


class Queue:
    """Operations of many sessions. Within a session first in, first out; between sessions round robin.

    Brief operations are the end of a step, and its policy samples again once they are done: in turns they
    would wait for the gradients of every other policy, and all of them would sample, then all learn. For what
    follows one that `leads` the others wait a moment (anticipatory scheduling, Iyer & Druschel, SOSP 2001).

    `choose` gets the first operation of every line, in the order of turns, and says which of them `perform`
    carries out together. A request's id is its operation's: one that waits, runs or is done stays as it is,
    one that failed is tried again. At most `of_line` wait of one session and `of_all` altogether.
    """

    def __init__(
        self,
        of_line: int,
        of_all: int,
        choose: Callable[[Sequence[Operation]], Sequence[Operation]] = alone,
        perform: Callable[[Sequence[Operation]], None] = perform_each,
    ):
        self.of_line, self.of_all, self.choose, self.perform = of_line, of_all, choose, perform
        # In the order of their turns: the line that was served goes to the end.
        self._lines: dict[str, deque[Operation]] = {}
        self._brief_served = 0
        self._running: Sequence[Operation] = ()
        self._before: Sequence[Operation] = ()
        self._ended_at = 0.0
        # How often not to linger again for a line, after its brief or its long ones.
        self._skips: dict[tuple[str, bool], int] = {}
        self._known: dict[str, Operation] = {}
        self._done: deque[Operation] = deque()
        self._mean_s, self._began, self._closed = SHORTEST_WAIT_S, 0.0, False
        self.refused = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="trainer", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: Request,
        line: str,
        work: Work,
        *,
        can_stop: bool = False,
        can_join: bool = False,
        brief: bool = False,
        leads: bool = False,
    ) -> str:
        """Queue an operation and return its id; for its marks see `Operation`.

        Raises `Busy` with the queue's state when it is full, `Conflict` when the id is another request's.
        """
        operation = Operation(request, line, work, can_stop, can_join, brief, leads)
        with self._changed:
            known = self._known.get(request.request_id)
            if known is None or _failed(known.future):
                self._refuse_when_full(line)
                self._known[request.request_id] = operation
                self._lines.setdefault(line, deque()).append(operation)
                self._changed.notify()
            elif known.content != operation.content:
                raise Conflict(
                    f"The request {request.request_id!r} came before and asked for something else. "
                    "Give each request an id of its own."
                )
        return request.request_id

    def operation(self, id: str) -> Operation:
        if id not in self._known:
            raise NotFound(
                f"There is no operation {id!r}; the trainer may have been restarted. Send it again."
            )
        return self._known[id]

    def cancel(self, id: str) -> None:
        """Call an operation off: one that waits at once, one that runs and can stop before its next part.

        Raises `Conflict` for one that has begun and cannot stop; one that is done stays so.
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
        """Return how many operations wait, and how long a new one of this session would wait in seconds."""
        with self._changed:
            return self._state(line, len(self._lines.get(line, ())))

    def place(self, id: str) -> dict[str, Any]:
        """Return the queue's state as an operation that has not ended sees it; `position` 0 runs."""
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
        return len(self._lines.get(line, ()))

    def close(self) -> None:
        """End after the operation that runs; those that wait fail, to be sent again."""
        with self._changed:
            self._closed = True
            for operation in [one for line in self._lines.values() for one in line]:
                operation.future.set_exception(ServiceError("The trainer is stopping; send this again."))
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
            # What waited may have been cancelled meanwhile.
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
        """Wait a moment for what follows the operations before, unless something brief or of theirs waits."""
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
        # A place is free after this session's next turn, or after anybody's.
        turns = len(self._lines) if mine >= self.of_line else 1
        wait_s = min(max(turns * self._mean_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)
        raise Busy(
            f"The trainer's queue is full: {mine} operations of this session wait, at most {self.of_line}, "
            f"and {waiting} of all, at most {self.of_all}. Send it again in {wait_s:.1f} s.",
            wait_s,
            {"queue_state": "paused_rate_limit", **self._state(line, mine)},
        )

    def _state(self, line: str, before: int) -> dict[str, Any]:
        """Return counts, and the position of an operation with `before` others ahead of it in its line."""
        waiting = {name: deque(one.brief for one in line) for name, line in self._lines.items()}
        # A new one may be long.
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
    """Return whether a brief operation is next, and how many have then come before a long one that waits.

    `briefs` says of each line whether its first operation is brief, `served` how many brief ones came so.
    """
    if all(briefs):
        return True, 0
    is_brief = any(briefs) and served < BRIEF_IN_A_ROW
    return is_brief, served + 1 if is_brief else 0


def _turns(lines: dict[str, deque[bool]], served: int) -> Iterator[str]:
    """Yield the lines as they will be served one operation at a time; consumes `lines`."""
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
