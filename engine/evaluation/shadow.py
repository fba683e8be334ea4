"""A shadow: the revision under release answers users' questions too, unseen, and the evaluators compare.

In the engine that answered the user, behind all users there: for a fixed share of users' answers, several of
them together, and where users are few, one by one for a fifth of the time. It rests while users wait longer
for their first token beside it than without it.
"""

import logging
import math
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
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
# Questions for each answer of users, how many are saved up, and how many pairs of answers are open at most.
SHARE, MOST_SAVED, MOST_OPEN = 0.125, 16.0, 8
# This many saved questions are asked at once: a step of the engine with eight of their rows costs little more
# than with one, and in between users meet none.
TOGETHER = 8
# One may follow alone after so many times the seconds that the last answer took.
ALONE_AFTER = 4.0
# Users' text is let go after so many seconds.
OLDEST_S = 120.0
# It rests for the first of these seconds in every so many, so that users are also met alone.
ALONE_S, TURN_S = 3.0, 30.0
# Users' times that are compared, at least and at most; beside it they may be longer by this share. They are
# compared four times a second: fewer standard errors would often be luck.
LEAST_TIMES, MOST_TIMES, SUFFERS, SURE = 100, 500, 1.2, 4.0
log = logging.getLogger("graftwork.evaluation")


class UsersTimes:
    """Users' seconds to the first byte, alone and beside a shadow, and whether they suffer by it.

    Those of one engine are compared with each other, those of streams, and those of whole answers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._times = defaultdict[tuple[str, str, bool], deque[float]](lambda: deque(maxlen=MOST_TIMES))

    def add(self, times: Mapping[str, Sequence[float]], is_beside: bool, engine: str = "") -> None:
        """Take users' times by kind; where they suffer, they are alone from now on, and then met anew."""
        for kind, seconds in times.items():
            self._times[engine, kind, is_beside].extend(seconds)
            alone, beside = self._times[engine, kind, False], self._times[engine, kind, True]
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
    While `is_paused` it asks nothing new.
    """

    def __init__(self, release: Release, scorers: Sequence[Scorer], emit: Emit, units: set[str]):
        self._release, self._scorers, self._emit, self._units = release, scorers, emit, units
        self._waiting: deque[Question] = deque(maxlen=MOST_WAITING)
        self._lock, self._is_closed, self.is_paused = threading.Lock(), False, False
        self._open, self._saved, self._free_at = 0, 0.0, 0.0
        self.times = UsersTimes()
        # Requests under way at each engine, and the engines that have been asked since their last look.
        self._asking, self._asked = Counter[httpx.Client](), set[httpx.Client]()
        self._pool = ThreadPoolExecutor(MOST_OPEN, f"shadow-{release.policy}")
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

    def note_times(self, times: Mapping[str, Sequence[float]], engine: httpx.Client) -> None:
        """Take the times of an engine's users since the last call."""
        with self._lock:
            is_beside = self._asking[engine] > 0 or engine in self._asked
            self._asked.discard(engine)
        self.times.add(times, is_beside, str(engine.base_url))

    def close(self) -> None:
        """Ask no more questions; the answers that come now are not compared."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
        self._thread.stop()
        self._pool.shutdown(wait=False)

    def _start(self) -> None:
        """Have questions asked, the newest first: its user's answer is the most like those that come now."""
        with self._lock:
            due = self._due
            while due and self._waiting and self._may_ask:
                question = self._waiting.pop()
                if question.unit not in self._units and not question.is_old:
                    due -= 1
                    self._units.add(question.unit)
                    self._open, self._saved = self._open + 1, max(0.0, self._saved - 1.0)
                    self._pool.submit(self._meet, question)

    @property
    def _due(self) -> int:
        """How many questions the share allows now: several together, one alone, or none."""
        if min(self._saved, len(self._waiting)) >= TOGETHER:
            return TOGETHER
        return int(not self._open and time.monotonic() >= self._free_at)

    @property
    def _may_ask(self) -> bool:
        """Whether users do not suffer by one more question, and evaluators that decide can score it."""
        if self._is_closed or self.is_paused or self._open >= MOST_OPEN:
            return False
        deciding = (one for one in self._scorers if one.config.decides != "nothing")
        # Answers that are under way will be scored before this one.
        return self.times.lets_pass and all(scorer.is_ready(self._open + 1) for scorer in deciding)

    def _meet(self, question: Question) -> None:
        is_met = False
        try:
            is_met = self._compare(question)
        except Exception:
            log.exception("A shadow's question failed.")
        with self._lock:
            self._open -= 1
            if not is_met:
                # Another question of the unit may follow.
                self._units.discard(question.unit)

    def _compare(self, question: Question) -> bool:
        """Have the revision answer, and the evaluators compare; return whether that is evidence."""
        copy, exchange, release = question.copy, question.exchange, self._release
        response = self._ask(question)
        # An engine that stops or cannot read its catalog is away; other errors of it are the revision's.
        if response is None or self._is_closed or response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return False
        if not response.is_success and not response.is_server_error:
            return False
        # The id of its observation, as the gateway makes it of the request's.
        own = copy["id"][: -len(response.headers["x-request-id"])] + response.headers["x-request-id"]
        answered = exchange_of(copy["path"], copy["request"], False, response.text)
        if response.is_success and answered is not None:
            answers = [
                Answered(copy["id"], copy["digest"], exchange.answer),
                Answered(own, release.revision, answered.answer),
            ]
            for scorer in self._scorers:
                scored = scorer.score(exchange.question, answers, {"messages": exchange.messages})
                if scored.may_pass and scored.scores is None and scorer.config.decides != "nothing":
                    return False
        id = str(uuid.uuid5(SHADOWS, f"{release.id}/{question.unit}"))
        self._emit(
            "shadows", id=id, release=release.id, request=copy["id"], answer=own, policy=release.policy,
            digest=release.revision, unit=question.unit, key=copy["key"],
        )  # fmt: skip
        return True

    def _ask(self, question: Question) -> httpx.Response | None:
        """Return the revision's answer; None where there is none."""
        model, engine = served_name(self._release.policy, self._release.revision), question.engine
        body, began = follow_up_body(question.copy["request"]) | {"model": model}, time.monotonic()
        with self._lock:
            self._asking[engine] += 1
        try:
            return engine.post(question.copy["path"], json=body)
        except (httpx.HTTPError, RuntimeError) as error:
            # A closed client raises RuntimeError: its engine has left.
            log.warning("A shadow's question got no answer: %r.", error)
            return None
        finally:
            ended = time.monotonic()
            with self._lock:
                self._free_at = ended + ALONE_AFTER * (ended - began)
                self._asking[engine] -= 1
                self._asked.add(engine)
