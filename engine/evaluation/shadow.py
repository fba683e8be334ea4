"""A shadow: the revision under release answers users' questions too, unseen, and the evaluators compare.

In the engine that answered the user, behind all users there: a fixed share of the questions; where users are
few, as many as keep the engine at work for half of the time. It rests while users wait longer for their
first token beside it than without it.
"""

import logging
import math
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx

from engine.catalog.records import Release, served_name
from engine.evaluation.conversations import Exchange, exchange_of, follow_up_body
from engine.evaluation.scorer import Answered, Emit, Scorer
from engine.threads import PeriodicThread

SHADOWS = uuid.UUID("0f6f3c57-6f0c-5c43-9a43-64f7d5a4a7c1")
# Questions that wait (2 MB each at most), and how often the next is looked for while there is none.
MOST_WAITING, EVERY_S = 32, 0.05
# Questions for each answer of users, those that are saved up and under way at most. Without a saved one the
# next may follow alone, after so many times the seconds that the last answer took.
SHARE, MOST_SAVED, AT_ONCE, ALONE_AFTER = 0.12, 16.0, 32, 1.0
# Users' text is let go after so many seconds.
OLDEST_S = 120.0
# It rests for the first of these seconds in every so many, so that users are also met alone.
ALONE_S, TURN_S = 3.0, 30.0
# Users' times that are compared, at least and at most; beside it they may be longer by this share. They are
# compared four times a second: fewer standard errors would often be luck.
LEAST_TIMES, MOST_TIMES, SUFFERS, SURE = 100, 500, 1.2, 4.0
log = logging.getLogger("graftwork.evaluation")


class UsersTimes:
    """Users' seconds to the first byte by kind of answer, alone and beside a shadow; do they suffer by it?"""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._times = defaultdict[tuple[str, bool], deque[float]](lambda: deque(maxlen=MOST_TIMES))

    def add(self, times: Mapping[str, Sequence[float]], is_beside: bool) -> None:
        """Take users' times by kind; where they suffer, they are alone from now on, and then met anew."""
        for kind, seconds in times.items():
            self._times[kind, is_beside].extend(seconds)
            alone, beside = self._times[kind, False], self._times[kind, True]
            if min(len(alone), len(beside)) >= LEAST_TIMES and are_longer(beside, alone):
                self._began = self._clock()
                beside.clear()

    @property
    def lets_pass(self) -> bool:
        """Whether the shadow may ask now."""
        return (self._clock() - self._began) % TURN_S >= ALONE_S


def are_longer(beside: Sequence[float], alone: Sequence[float]) -> bool:
    """Return whether the 95th percentile `beside` is surely above that of `alone` by more than `SUFFERS`."""
    p95 = sorted(alone)[int(0.95 * (len(alone) - 1))]
    # Of as short times a twentieth is above it.
    above = sum(seconds > SUFFERS * p95 for seconds in beside) / len(beside)
    return above > 0.05 + SURE * math.sqrt(0.05 * 0.95 * (1 / len(beside) + 1 / len(alone)))


@dataclass(frozen=True)
class Question:
    """A user's question with the baseline's answer, and the client of the engine that gave it."""

    copy: dict[str, Any]
    exchange: Exchange
    engine: httpx.Client
    taken_at: float = field(default_factory=time.monotonic)

    @cached_property
    def unit(self) -> str:
        """Its user, else its text without case and spacing."""
        text = " ".join(self.exchange.question.casefold().split())
        return str(self.copy["unit"] or uuid.uuid5(SHADOWS, text))

    @property
    def is_old(self) -> bool:
        """Whether it has waited so long that it is let go."""
        return time.monotonic() - self.taken_at > OLDEST_S


class Shadow:
    """Answers users' first questions by a release's revision, and has `scorers` compare.

    `units` are those that have been met; it adds to them. `emit` takes rows of the ledger's table `shadows`.
    """

    def __init__(self, release: Release, scorers: Sequence[Scorer], emit: Emit, units: set[str]):
        self._release, self._scorers, self._emit, self._units = release, scorers, emit, units
        self._waiting: deque[Question] = deque(maxlen=MOST_WAITING)
        self._lock, self._scoring, self._is_closed = threading.Lock(), threading.Lock(), False
        self._under_way, self._saved, self._free_at = 0, 0.0, 0.0
        self.times = UsersTimes()
        self._pool = ThreadPoolExecutor(AT_ONCE, f"shadow-{release.policy}")
        self._thread = PeriodicThread(f"shadow-{release.policy}", EVERY_S, self._start)
        self._thread.start()

    def take(self, question: Question) -> None:
        """Take a user's question, if it is a unit's first and no answer was before it."""
        is_first = question.exchange.is_first_turn and question.copy["digest"] == self._release.baseline
        with self._lock:
            if self.times.lets_pass:
                self._saved = min(self._saved + SHARE, MOST_SAVED)
            while self._waiting and self._waiting[0].is_old:
                self._waiting.popleft()
            if is_first and question.unit not in self._units:
                self._waiting.append(question)

    def note_times(self, times: Mapping[str, Sequence[float]]) -> None:
        """Take the times of an engine's users since the last call: every engine's share is asked."""
        self.times.add(times, self.times.lets_pass or self._under_way > 0)

    def close(self) -> None:
        """Ask no more questions; the answers that come now are not compared."""
        self._is_closed = True
        self._thread.stop()
        self._pool.shutdown(wait=False)
        with self._lock:
            self._waiting.clear()

    @property
    def _can_score(self) -> bool:
        """Whether every evaluator that decides can."""
        return all(one.is_ready for one in self._scorers if one.config.decides != "nothing")

    def _start(self) -> None:
        while self.times.lets_pass and self._can_score and (question := self._next()):
            self._pool.submit(self._meet, question)

    def _meet(self, question: Question) -> None:
        is_met = False
        try:
            is_met = self._compare(question)
        except Exception:
            log.exception("A shadow's question failed.")
        with self._lock:
            self._under_way -= 1
            if not is_met:
                # Another question of the unit may follow.
                self._units.discard(question.unit)

    def _next(self) -> Question | None:
        """Return the newest question, if one may be asked now: its answer is most like users' next ones."""
        with self._lock:
            may = self._saved >= 1.0 or (not self._under_way and time.monotonic() >= self._free_at)
            while self._waiting and may and self._under_way < AT_ONCE and not self._is_closed:
                question = self._waiting.pop()
                if question.unit not in self._units and not question.is_old:
                    self._units.add(question.unit)
                    self._under_way, self._saved = self._under_way + 1, max(0.0, self._saved - 1.0)
                    return question
        return None

    def _compare(self, question: Question) -> bool:
        """Have the revision answer, and the evaluators compare; return whether that is evidence."""
        copy, exchange, release = question.copy, question.exchange, self._release
        body = follow_up_body(copy["request"]) | {"model": served_name(release.policy, release.revision)}
        began = time.monotonic()
        try:
            response = question.engine.post(copy["path"], json=body)
        except httpx.HTTPError as error:
            log.warning("A shadow's question got no answer: %r.", error)
            return False
        self._free_at = time.monotonic() + ALONE_AFTER * (time.monotonic() - began)
        # An engine that stops or cannot read its catalog is away; other errors of it are the revision's.
        is_fault = response.is_server_error and response.status_code != httpx.codes.SERVICE_UNAVAILABLE
        if self._is_closed or not (response.is_success or is_fault):
            return False
        # The id of its observation, as the gateway makes it of the request's.
        own = copy["id"][: -len(response.headers["x-request-id"])] + response.headers["x-request-id"]
        answered = exchange_of(copy["path"], copy["request"], False, response.text)
        if response.is_success and answered is not None:
            answers = [
                Answered(copy["id"], copy["digest"], exchange.answer),
                Answered(own, release.revision, answered.answer),
            ]
            if not self._score(exchange, answers):
                return False
        id = str(uuid.uuid5(SHADOWS, f"{release.id}/{question.unit}"))
        self._emit(
            "shadows", id=id, release=release.id, request=copy["id"], answer=own, policy=release.policy,
            digest=release.revision, unit=question.unit, key=copy["key"],
        )  # fmt: skip
        return True

    def _score(self, exchange: Exchange, answers: Sequence[Answered]) -> bool:
        """Have all evaluators score; return whether those that decide have said something."""
        with self._scoring:
            # What others were scored meanwhile may have used up the rate.
            while not self._can_score and not self._is_closed:
                time.sleep(EVERY_S)
            if self._is_closed:
                return False
            for scorer in self._scorers:
                scored = scorer.score(exchange.question, answers, {"messages": exchange.messages})
                if scored.may_pass and scored.scores is None and scorer.config.decides != "nothing":
                    return False
        return True
