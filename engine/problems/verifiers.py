"""Verifiers: what an answer earns, by the policy's own rule.

`contract`, `exact` and `numeric` are quick and judge in this process. `regex`, `json-schema` and
`python:MODULE:FUNC` may loop for ever, so a process of their own judges, with a limit for each answer;
one that hangs is killed and started anew. A verifier that raises, hangs, or returns something else than
a number in [0, 1] earns 0 and is counted: it never ends a run.
"""

import json
import math
import multiprocessing
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError
from engine.problems.procedural import Problem, reward
from engine.process_reaper import die_with_parent
from engine.settings.own_functions import load_own
from engine.settings.params import PolicyConfig

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
TOLERANCE = 1e-6
START_S = 30.0
# The kinds of a verifier's own failures: a failure's name begins with one of them.
FAULTS = ("raised", "returned", "timeout", "died", "unloaded")
Judge = Callable[[str, str, str], Any]  # question, expected answer, text


def exact(_question: str, expected: str, text: str) -> bool:
    """The answer's text, up to outer space."""
    return text.strip() == expected.strip()


def numeric(_question: str, expected: str, text: str) -> bool:
    """The last number in the text equals the expected one within a millionth of it."""
    found = NUMBER.findall(text)
    wanted = float(expected.replace(",", ""))
    return bool(found) and math.isclose(float(found[-1].replace(",", "")), wanted, rel_tol=TOLERANCE)


def regex(_question: str, expected: str, text: str) -> bool:
    """The expected answer is a pattern that matches the whole text, up to outer space."""
    return re.fullmatch(expected, text.strip()) is not None


def json_schema(_question: str, expected: str, text: str) -> bool:
    """The expected answer is a JSON schema that the text, read as JSON, satisfies."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), json.loads(expected))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


QUICK: dict[str, Judge] = {"exact": exact, "numeric": numeric}
APART: dict[str, Judge] = {"regex": regex, "json-schema": json_schema}


def load_judge(kind: str) -> Judge:
    """Return the function that a verifier's name stands for; `ConfigError` when there is none."""
    return APART.get(kind) or load_own("verifier", kind, "question, answer, text")


@dataclass
class Verdicts:
    """Scores in [0, 1], one for each answer, and how often the verifier itself failed, by name (`FAULTS`)."""

    scores: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Verifier:
    """Judges answers by a policy's rule, of any thread. Close it, or use it in a `with` block."""

    def __init__(self, config: PolicyConfig):
        """Raises `ConfigError` when a `python:` verifier cannot be loaded."""
        self.kind, self.contract, self.timeout_s = config.verifier, config.contract, config.verifier_timeout_s
        self._apart = Apart(self.kind) if self._needs_process() else None

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._apart:
            self._apart.close()

    def judge(self, answers: Iterable[tuple[Problem, str]], whole: bool = False) -> Verdicts:
        """Score (problem, text) pairs in their order; `whole` ends at the first one that it fails on."""
        verdicts = Verdicts()
        for problem, text in answers:
            score, fault = self._score(problem, text)
            verdicts.scores.append(score)
            if fault:
                verdicts.errors[fault] += 1
                if whole:
                    break
        return verdicts

    def _needs_process(self) -> bool:
        return self.kind in APART or self.kind.startswith("python:")

    def _score(self, problem: Problem, text: str) -> tuple[float, str | None]:
        if self.kind == "contract":
            return reward(self.contract, problem, text), None
        asked = (problem.question, problem.answer, text)
        if self._apart:
            return self._apart.ask(asked, self.timeout_s)
        try:
            return number(QUICK[self.kind](*asked))
        except (ValueError, OverflowError) as error:
            return 0.0, f"raised {type(error).__name__}"


def number(value: Any) -> tuple[float, str | None]:
    """Return a verifier's value as a score, and what is wrong with it."""
    if not isinstance(value, (bool, int, float)):
        return 0.0, f"returned {type(value).__name__}"
    if not 0 <= value <= 1:
        return 0.0, "returned out of range"
    return float(value), None


class Apart:
    """A process that judges; it is killed when an answer takes too long, and dies with its parent."""

    def __init__(self, kind: str):
        self._kind = kind
        self._process: Any = None
        # Answers come back in the order of the questions, and two threads would take each other's.
        self._turn = threading.Lock()
        self._start()

    def ask(self, asked: tuple[str, str, str], timeout_s: float) -> tuple[float, str | None]:
        """Return the score of one answer, and what went wrong."""
        with self._turn:
            return self._ask(asked, timeout_s)

    def _ask(self, asked: tuple[str, str, str], timeout_s: float) -> tuple[float, str | None]:
        if self._process is None or not self._process.is_alive():
            self.close()
            try:
                self._start()
            except ConfigError:
                # It was loaded once; what has happened to it since must not end the run.
                return 0.0, "unloaded"
        try:
            self._pipe.send(asked)
            if not self._pipe.poll(timeout_s):
                self.close()
                return 0.0, "timeout"
            score, fault = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            return 0.0, "died"
        return score, fault

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        # Not forked: this process has threads and may hold a model.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._kind, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_S):
            self.close()
            raise ConfigError(f"The verifier {self._kind!r} took more than {START_S:g} s to load.")
        try:
            refusal = self._pipe.recv()
        except EOFError:
            refusal = f"The verifier {self._kind!r} ended its process while it was loaded."
        if refusal:
            self.close()
            raise ConfigError(refusal)


def _serve(kind: str, pipe: Any) -> None:
    """Judge what comes through the pipe until its other end is gone; the first message is a refusal."""
    # A judge that loops for ever would outlive a parent that was killed.
    die_with_parent(os.getppid())
    try:
        judge = load_judge(kind)
    except ConfigError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            answer = number(judge(*asked))
        except Exception as error:
            # One's own function may raise anything: it costs this answer and not the run.
            answer = (0.0, f"raised {type(error).__name__}")
        pipe.send(answer)
