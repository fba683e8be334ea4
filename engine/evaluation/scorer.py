"""One evaluator of one release: its rate, its budget and its retries, and the ledger rows of its scores."""

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.catalog.records import Release
from engine.evaluation.evaluators import Evaluator, Scored
from engine.settings.evaluators import EvaluatorConfig

SCORES = uuid.UUID("7a1f6a52-6f0e-5d0c-9c5e-0d9a4c1f3b7e")
# Attempts at some answers, the seconds before the second one, and the longest rest of one that is away.
ATTEMPTS, RETRY_S, REST_S = 3, 0.5, 30.0
# What is said of answers that were not sent to an evaluator: later ones may be.
NOT_ASKED = Scored(None, "not asked", may_pass=True)
Emit = Callable[..., object]
log = logging.getLogger("graftwork.evaluation")


@dataclass(frozen=True)
class Answered:
    """An answer to be scored: the id of the observation, and the digest of its revision (None: the base)."""

    request: str
    digest: str | None
    text: str


class Scorer:
    """Scores answers by one evaluator, thread-safe; `emit` takes rows of the ledger's table `evaluations`.

    `spent` is what the evaluator has cost this release before: tokens of a judge, seconds of another.
    """

    def __init__(
        self,
        release: Release,
        name: str,
        config: EvaluatorConfig,
        evaluator: Evaluator,
        emit: Emit,
        spent: float = 0.0,
    ):
        self.name, self.config = name, config
        self._release, self._evaluator, self._emit = release, evaluator, emit
        self._spent = spent
        self._lock = threading.Lock()
        # Answers that may be scored now, and as of when; failures in a row, and until when it rests.
        self._places, self._counted_at = 1.0, time.monotonic()
        self._failed, self._rests_until = 0, 0.0
        # Calls under way, and the most that one has cost.
        self._calls, self._price = 0, 0.0
        self._chance = random.Random()

    def is_ready(self, calls: int = 1) -> bool:
        """Whether it may score so many times now: within its rate and its budget, and not away."""
        with self._lock:
            return self._may_call(calls)

    def _may_call(self, calls: int = 1) -> bool:
        # Beside the calls under way.
        can_pay = self._spent + self._calls * self._price < self.config.budget
        return self._refill() >= calls and can_pay and time.monotonic() >= self._rests_until

    def score(self, question: str, answers: Sequence[Answered], context: dict[str, Any]) -> Scored:
        """Score answers to one question, in random order, and emit a row for each; return what it said.

        Nothing is asked, and no row is emitted, beyond rate and budget and while the evaluator is away.
        """
        if not self._take(len(answers)):
            return NOT_ASKED
        order = self._chance.sample(range(len(answers)), len(answers))
        scored = self._attempt(question, [answers[number].text for number in order], context)
        scores = None
        if scored.scores is not None:
            by_number = dict(zip(order, scored.scores, strict=True))
            scores = [by_number[number] for number in range(len(answers))]
        for number, answer in enumerate(answers):
            self._record(answer, scores[number] if scores else None, scored, len(answers))
        return replace(scored, scores=scores)

    def close(self) -> None:
        """End the evaluator."""
        self._evaluator.close()

    def _refill(self) -> float:
        now, per_s = time.monotonic(), self.config.per_minute / 60
        # What was not used within a second is lost, so that no minute has more.
        self._places = min(max(1.0, per_s), self._places + (now - self._counted_at) * per_s)
        self._counted_at = now
        return self._places

    def _take(self, count: int) -> bool:
        with self._lock:
            if not self._may_call():
                return False
            self._places -= count
            self._calls += 1
            return True

    def _attempt(self, question: str, texts: list[str], context: dict[str, Any]) -> Scored:
        """Ask until there are scores, at most `ATTEMPTS` times; every attempt costs."""
        seconds, tokens = 0.0, 0
        for number in range(ATTEMPTS):
            if number:
                time.sleep(RETRY_S * 2 ** (number - 1))
            scored = self._ask(question, texts, context)
            cost = scored.seconds if scored.tokens is None else scored.tokens
            seconds, tokens = seconds + scored.seconds, tokens + (scored.tokens or 0)
            with self._lock:
                self._spent, self._price = self._spent + cost, max(self._price, cost)
                is_over = self._spent >= self.config.budget
            if scored.scores is not None or not scored.may_pass or is_over:
                break
        with self._lock:
            self._calls -= 1
            self._failed = 0 if scored.scores is not None else self._failed + 1
            if scored.may_pass and scored.scores is None:
                self._rests_until = time.monotonic() + min(REST_S, 2.0**self._failed)
        return replace(scored, seconds=seconds, tokens=tokens or None)

    def _ask(self, question: str, texts: list[str], context: dict[str, Any]) -> Scored:
        try:
            return self._evaluator.score(question, texts, context)
        except Exception as error:
            # Whatever it calls may fail in any way: that costs these answers their scores.
            log.exception("The evaluator %r failed.", self.name)
            return Scored(None, f"raised {type(error).__name__}")

    def _record(self, answer: Answered, score: float | None, scored: Scored, count: int) -> None:
        """Emit a row, with this answer's part of the cost. A score has one id, however often it is made."""
        release, version = self._release, self.config.version
        about = f"{release.id}/{answer.request}/{answer.digest}/{self.name}/{version}"
        # A failed attempt is no score, and another one may follow.
        id = str(uuid.uuid5(SCORES, about)) if score is not None else str(uuid.uuid4())
        self._emit(
            "evaluations",
            id=id,
            release=release.id,
            request=answer.request,
            policy=release.policy,
            digest=answer.digest,
            evaluator=self.name,
            version=version,
            score=score,
            fault=scored.fault,
            seconds=scored.seconds / count,
            tokens=None if scored.tokens is None else round(scored.tokens / count),
        )
