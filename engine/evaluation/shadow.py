"""A shadow: the revision under release answers users' questions too, unseen, and the evaluators compare.

One question at a time, at background priority, in the engine that answered the user. It rests while users
wait longer for their first token beside it than without it.
"""

import logging
import math
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.catalog.records import Release, served_name
from engine.evaluation.conversations import Exchange, exchange_of, follow_up_body
from engine.evaluation.scorer import Answered, Emit, Scorer
from engine.threads import PeriodicThread

SHADOWS = uuid.UUID("0f6f3c57-6f0c-5c43-9a43-64f7d5a4a7c1")
# Questions that wait (2 MB each at most), and how often the next is looked for while there is none.
MOST_WAITING, EVERY_S = 32, 0.05
# Users' text is let go after so many seconds.
OLDEST_S = 120.0
# It rests for the first of these seconds in every so many, so that users are also met alone.
ALONE_S, TURN_S = 2.0, 20.0
# Users' times that are compared, at least and at most; beside it they may be longer by this share.
LEAST_TIMES, MOST_TIMES, SUFFERS, REST_S = 100, 500, 1.2, 4.0
# It is compared four times a second: fewer standard errors would often be luck.
SURE = 4.0
# Of an engine that stops or cannot read its catalog; other errors of a server are the revision's.
SERVER_ERROR, UNAVAILABLE = 500, 503
log = logging.getLogger("graftwork.evaluation")


class UsersTimes:
    """Users' seconds to the first byte, alone and beside a shadow, and whether they suffer by it.

    Those of one engine are compared with each other, those of streams, and those of whole answers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._times = defaultdict[tuple[str, str, bool], deque[float]](lambda: deque(maxlen=MOST_TIMES))
        self._rests_until = 0.0

    def add(self, times: Mapping[str, Sequence[float]], is_beside: bool, engine: str = "") -> None:
        """Take users' times by kind; where they suffer, the shadow rests."""
        for kind, seconds in times.items():
            self._times[engine, kind, is_beside].extend(seconds)
            alone, beside = self._times[engine, kind, False], self._times[engine, kind, True]
            if min(len(alone), len(beside)) >= LEAST_TIMES and are_longer(beside, alone):
                self._rests_until = self._clock() + REST_S
                # As of its next turn they are met anew.
                beside.clear()

    @property
    def lets_pass(self) -> bool:
        """Whether the shadow may ask now."""
        now = self._clock()
        return now >= self._rests_until and (now - self._began) % TURN_S >= ALONE_S


def are_longer(beside: Sequence[float], alone: Sequence[float]) -> bool:
    """Return whether the 95th percentile `beside` is surely above that of `alone` by more than `SUFFERS`.

    Of as short times a twentieth is above the percentile of the others.
    """
    p95 = sorted(alone)[int(0.95 * (len(alone) - 1))]
    above = sum(seconds > SUFFERS * p95 for seconds in beside) / len(beside)
    return above > 0.05 + SURE * math.sqrt(0.05 * 0.95 * (1 / len(beside) + 1 / len(alone)))


@dataclass(frozen=True)
class Question:
    """A user's question with the baseline's answer, and the client of the engine that gave it."""

    copy: dict[str, Any]
    exchange: Exchange
    engine: httpx.Client
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def is_old(self) -> bool:
        """Whether it has waited so long that it is let go."""
        return time.monotonic() - self.taken_at > OLDEST_S


class Shadow:
    """Answers users' first questions by a release's revision, and has `scorers` compare.

    `units` are those that have been met. `emit` takes rows of the ledger's table `shadows`.
    """

    def __init__(self, release: Release, scorers: Sequence[Scorer], emit: Emit, units: set[str]):
        self._release, self._scorers, self._emit, self._units = release, scorers, emit, units
        self._model = served_name(release.policy, release.revision)
        self._waiting: deque[Question] = deque(maxlen=MOST_WAITING)
        self._lock, self._is_closed = threading.Lock(), False
        self.times = UsersTimes()
        # The engine that answers now, and those that have answered since their last look.
        self._asking: httpx.Client | None = None
        self._asked: set[httpx.Client] = set()
        self._thread = PeriodicThread(f"shadow-{release.policy}", EVERY_S, self._work)
        self._thread.start()

    def take(self, question: Question) -> None:
        """Take a user's question, if it is a unit's first and no answer was before it."""
        copy, exchange = question.copy, question.exchange
        if copy["digest"] != self._release.baseline or not exchange.is_first_turn:
            return
        with self._lock:
            while self._waiting and self._waiting[0].is_old:
                self._waiting.popleft()
            if unit_of(copy, exchange) not in self._units:
                self._waiting.append(question)

    def note_times(self, times: Mapping[str, Sequence[float]], engine: httpx.Client) -> None:
        """Take the times of an engine's users since the last call."""
        is_beside = self._asking is engine or engine in self._asked
        self._asked.discard(engine)
        self.times.add(times, is_beside, str(engine.base_url))

    def close(self) -> None:
        """Ask no more questions; the answer that comes now is not compared."""
        self._is_closed = True
        self._thread.stop()
        with self._lock:
            self._waiting.clear()

    @property
    def _may_ask(self) -> bool:
        """Whether every evaluator that decides can score, and users do not suffer."""
        deciding = (one for one in self._scorers if one.config.decides != "nothing")
        return not self._is_closed and self.times.lets_pass and all(scorer.is_ready for scorer in deciding)

    def _work(self) -> None:
        while self._may_ask:
            with self._lock:
                # Of the newest the user's answer is the most like what users get now.
                question = self._waiting.pop() if self._waiting else None
                if question is None:
                    return
                unit = unit_of(question.copy, question.exchange)
                if unit in self._units or question.is_old:
                    continue
                self._units.add(unit)
            if not self._compare(question, unit):
                # It was not met: another question of the unit may follow.
                self._units.discard(unit)

    def _compare(self, question: Question, unit: str) -> bool:
        """Have the revision answer, and the evaluators compare; return whether that is evidence."""
        copy, exchange = question.copy, question.exchange
        response = self._ask(question)
        if response is None or self._is_closed or not says_something(response):
            return False
        # The id of its observation, as the gateway makes it of the request's.
        own = copy["id"][: -len(response.headers["x-request-id"])] + response.headers["x-request-id"]
        answered = exchange_of(copy["path"], copy["request"], False, response.text)
        if response.is_success and answered is not None:
            answers = [
                Answered(copy["id"], copy["digest"], exchange.answer),
                Answered(own, self._release.revision, answered.answer),
            ]
            for scorer in self._scorers:
                scored = scorer.score(exchange.question, answers, {"messages": exchange.messages})
                if scored.may_pass and scored.scores is None and scorer.config.decides != "nothing":
                    return False
        self._emit(
            "shadows",
            id=str(uuid.uuid5(SHADOWS, f"{self._release.id}/{unit}")),
            release=self._release.id,
            request=copy["id"],
            answer=own,
            policy=self._release.policy,
            digest=self._release.revision,
            unit=unit,
            key=copy["key"],
        )
        return True

    def _ask(self, question: Question) -> httpx.Response | None:
        """Return the revision's answer; None where there is none."""
        body = follow_up_body(question.copy["request"]) | {"model": self._model}
        self._asking = question.engine
        try:
            return question.engine.post(question.copy["path"], json=body)
        except httpx.HTTPError as error:
            log.warning("A shadow's question got no answer: %r.", error)
            return None
        finally:
            self._asked.add(question.engine)
            self._asking = None


def says_something(response: httpx.Response) -> bool:
    """Return whether a response is an answer of the revision, or its fault."""
    status = response.status_code
    return response.is_success or (status >= SERVER_ERROR and status != UNAVAILABLE)


def unit_of(copy: dict[str, Any], exchange: Exchange) -> str:
    """Return a question's unit: its user, else its text without case and spacing."""
    return str(copy["unit"] or uuid.uuid5(SHADOWS, " ".join(exchange.question.casefold().split())))
