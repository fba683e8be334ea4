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
from dataclasses import dataclass
from typing import Any

import httpx

from engine.catalog.records import Release, served_name
from engine.evaluation.conversations import Exchange, exchange_of, follow_up_body
from engine.evaluation.scorer import Answered, Emit, Scorer
from engine.threads import PeriodicThread

SHADOWS = uuid.UUID("0f6f3c57-6f0c-5c43-9a43-64f7d5a4a7c1")
# Questions that wait, and how often the next is looked for while there is none.
MOST_WAITING, EVERY_S = 64, 0.05
# It rests for the first of these seconds in every so many, so that users are also met alone.
ALONE_S, TURN_S = 2.0, 20.0
# Users' times that are compared, at least and at most; beside it they may be longer by this share.
LEAST_TIMES, MOST_TIMES, SUFFERS, REST_S = 20, 500, 1.1, 10.0
# It is compared four times a second: fewer standard errors would often be luck.
SURE = 4.0
# Of an engine that stops or cannot read its catalog; other errors of a server are the revision's.
SERVER_ERROR, UNAVAILABLE = 500, 503
log = logging.getLogger("graftwork.evaluation")


class UsersTimes:
    """Users' seconds to the first byte, alone and beside a shadow, and whether they suffer by it.

    Those of streams are compared with each other, and those of whole answers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._times = defaultdict[tuple[str, bool], deque[float]](lambda: deque(maxlen=MOST_TIMES))
        self._rests_until = 0.0

    def add(self, times: Mapping[str, Sequence[float]], is_beside: bool) -> None:
        """Take users' times by kind; where they suffer, the shadow rests."""
        for kind, seconds in times.items():
            self._times[kind, is_beside].extend(seconds)
            alone, beside = self._times[kind, False], self._times[kind, True]
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


class Shadow:
    """Answers users' first questions by a release's revision, and has `scorers` compare.

    `units` are those that have been met. `emit` takes rows of the ledger's table `shadows`.
    """

    def __init__(self, release: Release, scorers: Sequence[Scorer], emit: Emit, units: set[str]):
        self._release, self._scorers, self._emit, self._units = release, scorers, emit, units
        self._model = served_name(release.policy, release.revision)
        self._waiting: deque[Question] = deque(maxlen=MOST_WAITING)
        self._lock = threading.Lock()
        self.times = UsersTimes()
        # Whether it has asked the engine since the last look.
        self._has_asked = False
        self._thread = PeriodicThread(f"shadow-{release.policy}", EVERY_S, self._work)
        self._thread.start()

    def take(self, question: Question) -> None:
        """Take a user's question, if it is a unit's first and no answer was before it."""
        copy, exchange = question.copy, question.exchange
        if copy["digest"] != self._release.baseline or not exchange.is_first_turn:
            return
        with self._lock:
            if unit_of(copy, exchange) not in self._units:
                self._waiting.append(question)

    def has_asked(self) -> bool:
        """Return whether it has asked the engine since the last call."""
        asked, self._has_asked = self._has_asked, False
        return asked

    def close(self) -> None:
        """Ask no more questions."""
        self._thread.stop()

    def _work(self) -> None:
        while self.times.lets_pass and all(scorer.is_ready for scorer in self._scorers):
            with self._lock:
                # The newest: what the engine has of its prompt is still in its cache.
                question = self._waiting.pop() if self._waiting else None
                if question is None:
                    return
                unit = unit_of(question.copy, question.exchange)
                if unit in self._units:
                    continue
                self._units.add(unit)
            self._compare(question, unit)

    def _compare(self, question: Question, unit: str) -> None:
        copy, exchange = question.copy, question.exchange
        response = self._ask(question)
        if response is None or not says_something(response):
            return
        # The id of its observation, as the gateway makes it of the request's.
        own = copy["id"][: -len(response.headers["x-request-id"])] + response.headers["x-request-id"]
        answered = exchange_of(copy["path"], copy["request"], False, response.text)
        if response.is_success and answered is not None:
            answers = [
                Answered(copy["id"], copy["digest"], exchange.answer),
                Answered(own, self._release.revision, answered.answer),
            ]
            for scorer in self._scorers:
                scorer.score(exchange.question, answers, {"messages": exchange.messages})
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

    def _ask(self, question: Question) -> httpx.Response | None:
        """Return the revision's answer; None where there is none."""
        body = follow_up_body(question.copy["request"]) | {"model": self._model}
        self._has_asked = True
        try:
            return question.engine.post(question.copy["path"], json=body)
        except httpx.HTTPError as error:
            log.warning("A shadow's question got no answer: %r.", error)
            return None
        finally:
            self._has_asked = True


def says_something(response: httpx.Response) -> bool:
    """Return whether a response is an answer of the revision, or its fault."""
    status = response.status_code
    return response.is_success or (status >= SERVER_ERROR and status != UNAVAILABLE)


def unit_of(copy: dict[str, Any], exchange: Exchange) -> str:
    """Return a question's unit: its user, else its text without case and spacing."""
    return str(copy["unit"] or uuid.uuid5(SHADOWS, " ".join(exchange.question.casefold().split())))
