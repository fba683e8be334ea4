"""Evaluators that run here: a user's function, and a policy's own verifier. `judge.py` has those elsewhere.

Each scores a list of answers to one question. None is told which revision gave an answer.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import ConfigError
from engine.problems.verifiers import Apart


@dataclass(frozen=True)
class Scored:
    """What an evaluator says of some answers: a score in [0, 1] for each, or None with its `fault`.

    `seconds` and `tokens` are what it cost; only a judge uses tokens. A fault that `may_pass` is worth
    another attempt.
    """

    scores: list[float] | None
    fault: str | None = None
    seconds: float = 0.0
    tokens: int | None = None
    may_pass: bool = False


class Evaluator(Protocol):
    """Scores answers; may be called by several threads."""

    def score(self, question: str, answers: Sequence[str], context: dict[str, Any]) -> Scored:
        """Return a score for each answer to the question. `context` has `messages` before the answer."""

    def close(self) -> None:
        """End what it has started."""


class FunctionEvaluator:
    """`python:MODULE:FUNC`, called with (question, answers, context) in a process of its own.

    It scores one question's answers at a time. Raises `ConfigError` when it cannot be loaded.
    """

    # The process's module, and what it is called in errors.
    _RUNS_IN = ("engine.evaluation.function_process", "evaluator")

    def __init__(self, kind: str, timeout_s: float):
        self._process, self._timeout_s, self._turn = Apart(kind, *self._RUNS_IN), timeout_s, threading.Lock()

    def score(self, question: str, answers: Sequence[str], context: dict[str, Any]) -> Scored:
        """Return the scores. Who waits for the turn costs nothing."""
        with self._turn:
            began = time.monotonic()
            scores, fault = self._ask(question, list(answers), context)
            seconds = time.monotonic() - began
        if fault is None and len(scores) != len(answers):
            fault = f"returned {len(scores)} scores for {len(answers)} answers"
        return Scored(None if fault else scores, fault, seconds)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(
        self, question: str, answers: list[str], context: dict[str, Any]
    ) -> tuple[list[float], str | None]:
        return self._process.ask((question, answers, context), self._timeout_s)


class VerifierEvaluator(FunctionEvaluator):
    """A policy's own verifier, where it needs no expected answer: a `python:` function, which is given "".

    Raises `ConfigError` for another verifier, or when it cannot be loaded.
    """

    _RUNS_IN = ("engine.problems.verifier_process", "verifier")

    def __init__(self, verifier: str, timeout_s: float):
        if not verifier.startswith("python:"):
            raise ConfigError(
                f"The verifier {verifier!r} needs an expected answer, which users' questions do not have. "
                "Name an evaluator of another kind, such as python:MODULE:FUNC."
            )
        super().__init__(verifier, timeout_s)

    def _ask(
        self, question: str, answers: list[str], context: dict[str, Any]
    ) -> tuple[list[float], str | None]:
        said = [self._process.ask((question, "", answer), self._timeout_s) for answer in answers]
        return [score for score, _ in said], next((fault for _, fault in said if fault), None)
