"""Verifiers: the reward of an answer by the policy's own rule.

`contract`, `exact` and `numeric` are quick and run in this process. `regex`, `json-schema` and
`python:MODULE:FUNC` may never end, so they run in a process with a clean environment and a time limit
for each answer; a hanging process is killed and restarted. A verifier that raises, hangs, or returns anything
but a number in [0, 1] gives 0 and is counted. It never ends a run. `RULES` has the versions of what is right.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError
from engine.problems.procedural import Problem, reward
from engine.problems.written_numbers import are_equal, bare_number, last_number
from engine.settings.own_functions import LIKELIHOODS, load_own
from engine.settings.policies import PolicyConfig

# A rule that judges answers otherwise than before gets the next version. It is a part of its suites' version,
# so that scores by two rules are never compared. Version 1 is not listed.
RULES = {"exact": 2, "numeric": 2, "regex": 2, "json-schema": 2}
# What float sums add to a score: as much beside 0 or 1 is 0 or 1, and two rewards as far apart are equal.
ROUNDING = 1e-6
START_S = 30.0
# A verifier's process starts with these variables alone, not with the passwords of this one.
ENVIRONMENT = {
    "PATH": os.defpath,
    "PYTHONUTF8": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Kinds of verifier failures; a failure's name starts with one of them.
FAULTS = ("raised", "returned", "timeout", "died", "unloaded")
# What a pattern has where its composed form may be another pattern.
COMPOSED_OTHERWISE = re.compile(r"[\\[{?*+]")
Judge = Callable[[str, str, str], Any]  # question, expected answer, text


def same_spelling(text: str) -> str:
    """Return a text in Unicode's composed form (NFC), without surrounding white space."""
    return unicodedata.normalize("NFC", text).strip()


def exact(_question: str, expected: str, text: str) -> bool:
    """Say whether the text is the expected one in `same_spelling`."""
    return same_spelling(text) == same_spelling(expected)


def numeric(_question: str, expected: str, text: str) -> bool:
    """Say whether the last number in the text is the expected one, as `written_numbers` reads both.

    Raises `ValueError` when the expected answer is not one number.
    """
    wanted = bare_number(expected)
    if wanted is None:
        raise ValueError(f"{expected!r} is not one number")
    return any(are_equal(number, wanted) for number in last_number(text))


def regex(_question: str, expected: str, text: str) -> bool:
    """Say whether the pattern `expected` matches the whole text in Unicode's composed form (NFC).

    The pattern is composed as well, unless it has a class, a quantifier or an escape: `e\u0301?` and
    `[e\u0301]` would be other patterns. Where it has combining marks then, the text may also be decomposed.
    """
    if not COMPOSED_OTHERWISE.search(expected):
        return re.fullmatch(unicodedata.normalize("NFC", expected), same_spelling(text)) is not None
    has_marks = any(map(unicodedata.combining, expected))
    forms: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD") if has_marks else ("NFC",)
    return any(re.fullmatch(expected, unicodedata.normalize(form, text).strip()) for form in forms)


def json_schema(_question: str, expected: str, text: str) -> bool:
    """Say whether the text is JSON that satisfies the schema `expected`.

    Text with NaN, Infinity or one key twice is not JSON here. Raises `Unresolvable` for a reference out of
    the schema: no file and no URL is read.
    """
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    try:
        value = json.loads(
            unicodedata.normalize("NFC", text),
            parse_constant=_no_constant,
            object_pairs_hook=_without_doubles,
        )
    except (ValueError, RecursionError):
        return False
    schema = json.loads(unicodedata.normalize("NFC", expected))
    return bool(validator_for(schema)(schema, registry=REGISTRY).is_valid(value))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is given twice")
    return fields


def foreign_reference(schema: Any) -> str | None:
    """Return a reference of a JSON schema that leads out of it, or None."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = REGISTRY.resolver_with_root(DRAFT202012.create_resource(schema))
    inner = [schema]
    while inner:
        node = inner.pop()
        if isinstance(node, list):
            inner += node
        if not isinstance(node, dict):
            continue
        inner += node.values()
        for reference in (node.get("$ref"), node.get("$dynamicRef")):
            try:
                if isinstance(reference, str):
                    resolver.lookup(reference)
            except Unresolvable:
                return reference
    return None


QUICK: dict[str, Judge] = {"exact": exact, "numeric": numeric}
APART: dict[str, Judge] = {"regex": regex, "json-schema": json_schema}


def load_judge(kind: str) -> Judge:
    """Return a verifier's function by name; `ConfigError` when there is none."""
    return APART.get(kind) or load_own("verifier", kind, "question, answer, text")


@dataclass
class Verdicts:
    """Scores in [0, 1], one for each answer, and counts of verifier failures by name (`FAULTS`)."""

    scores: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Verifier:
    """Score answers by a policy's rule; thread-safe. Close it, or use it in a `with` block."""

    def __init__(self, config: PolicyConfig):
        """Start the verifier; `ConfigError` when it cannot be loaded, or judges no answers."""
        if config.verifier in LIKELIHOODS:
            raise ConfigError(
                f"The policy has no verifier of answers: {config.verifier!r} scores revisions by the "
                "probability of known answers. Give it one, such as exact or python:MODULE:FUNC."
            )
        self.kind, self.contract, self.timeout_s = config.verifier, config.contract, config.verifier_timeout_s
        needs_process = self.kind in APART or self.kind.startswith("python:")
        self._apart = Apart(self.kind) if needs_process else None

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the verifier's process, if it has one."""
        if self._apart:
            self._apart.close()

    def judge(self, answers: Iterable[tuple[Problem, str]], whole: bool = False) -> Verdicts:
        """Score (problem, text) pairs in order; with `whole`, stop at the first verifier failure."""
        verdicts = Verdicts()
        for problem, text in answers:
            score, fault = self._score(problem, text)
            verdicts.scores.append(score)
            if fault:
                verdicts.errors[fault] += 1
                if whole:
                    break
        return verdicts

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
    """Return a verifier's value as a score, and its fault or None.

    A number is whatever Python, numpy or torch calls one, booleans and arrays without dimensions among them.
    """
    kind = type(value).__name__
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    is_number = isinstance(value, (Real, Decimal))
    if not is_number:
        return 0.0, f"returned {kind}"
    if not -ROUNDING <= value <= 1 + ROUNDING:
        return 0.0, "returned out of range"
    nearest = round(value)
    return float(nearest if abs(value - nearest) <= ROUNDING else value), None


def has_spread(rewards: Sequence[float]) -> bool:
    """Say whether the rewards of a group differ by more than rounding, so that it teaches something."""
    return max(rewards) - min(rewards) > ROUNDING


class Apart:
    """A process of a verifier, or of another function by name that `module` loads.

    It is killed when an answer takes too long, and dies with its parent. `what` names it in errors.
    """

    def __init__(self, kind: str, module: str = "engine.problems.verifier_process", what: str = "verifier"):
        self._kind, self._module, self._what = kind, module, what
        self._process: subprocess.Popen[bytes] | None = None
        # Answers come back in request order, so threads must take turns.
        self._turn = threading.Lock()
        self._is_closed = False
        self._start()

    def ask(self, asked: tuple[Any, ...], timeout_s: float) -> tuple[Any, str | None]:
        """Return what the function says of one answer, and the fault or None; with a fault it says 0."""
        with self._turn:
            return self._ask(asked, timeout_s)

    def _ask(self, asked: tuple[Any, ...], timeout_s: float) -> tuple[Any, str | None]:
        if self._is_closed:
            return 0.0, "closed"
        if self._process is None or self._process.poll() is not None:
            self._kill()
            try:
                self._start()
            except ConfigError:
                # It was loaded once; a later failure to load must not end the run.
                return 0.0, "unloaded"
        try:
            self._pipe.send(asked)
            if not self._pipe.poll(timeout_s):
                self._kill()
                return 0.0, "timeout"
            answer, fault = self._pipe.recv()
        except (EOFError, OSError):
            self._kill()
            return 0.0, "died"
        return answer, fault

    def close(self) -> None:
        """Kill the process for good; an answer that it computes now, and those that wait, get no score."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", self._module, self._kind, str(theirs.fileno())]
        environment = ENVIRONMENT | {"HOME": str(Path.home()), "PYTHONPATH": os.pathsep.join(sys.path)}
        # What a verifier prints goes to the log: the standard output may be a command's JSON.
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2
        )
        theirs.close()
        if not self._pipe.poll(START_S):
            self._kill()
            raise ConfigError(
                f"The {self._what} {self._kind!r} took more than {START_S:g} s to load. Make its import "
                "faster."
            )
        try:
            refusal = self._pipe.recv()
        except EOFError:
            refusal = (
                f"The {self._what} {self._kind!r} ended its process while it was loading. Check its module."
            )
        if refusal:
            self._kill()
            raise ConfigError(refusal)
