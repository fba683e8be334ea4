"""Problems with a known answer, and the answer contracts that earn a reward.

A problem comes from a `reasoning-gym` generator with small settings, or from an imported JSONL file. The
numbers in a generated question determine its split, so no phrasing of a training problem is ever an
evaluation item or a demo user's question. An imported file is split at its import.
"""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError
from engine.problems.jsonl import order, rows_of
from engine.problems.rows import Asked, Message

Split = Literal["train", "eval", "user", "validation"]
# Beside a training file: rows for validation during training alone.
VALIDATION = "validation.jsonl"

# One phrasing for each contract, in the order of CONTRACTS: a base mostly answers in the phrasing's style.
PHRASINGS: dict[str, tuple[str, str, str, str]] = {
    "addition": ("{0} =", "Calculate {0} for me.", "What is {0}?", "Find {0}."),
    "sorting": ("{1} order: {0}", "Put {0} in {1} order.", "What is {0} in {1} order?", "Sort {0}, {1}."),
}


@dataclass(frozen=True)
class Problem:
    """A question and its plain answer, such as `46` or `3, 12, 45`; a chat has its messages beside it.

    A pair has its worse answer in `rejected`.
    """

    task: str
    question: str
    answer: str
    phrasing: int = 0
    messages: tuple[Message, ...] = ()
    rejected: str = ""

    @property
    def asked(self) -> Asked:
        """What the base's template renders."""
        return self.messages or self.question


@dataclass(frozen=True)
class Task:
    """A `reasoning-gym` generator, its settings, and the function from its entry to a question's parts."""

    dataset: str
    settings: dict[str, Any]
    parts: Callable[[dict[str, Any]], tuple[tuple[str, ...], str]]


def _addition(entry: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    return (entry["metadata"]["expression"],), entry["answer"]


def _sorting(entry: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    meta = entry["metadata"]
    numbers = ", ".join(_whole(number) for number in meta["original_numbers"])
    return (numbers, meta["direction"]), ", ".join(_whole(number) for number in meta["sorted_numbers"])


def _whole(number: str) -> str:
    return str(round(float(number)))


TASKS: dict[str, Task] = {
    "addition": Task(
        "basic_arithmetic",
        {"max_terms": 2, "min_digits": 2, "max_digits": 2, "operators": ("+",), "allow_parentheses": False},
        _addition,
    ),
    "sorting": Task(
        "number_sorting",
        {"min_numbers": 4, "max_numbers": 5, "max_decimals": 0, "min_value": 0, "max_value": 9},
        _sorting,
    ),
}


def problem(task: str, index: int, seed: int) -> Problem:
    """Return problem `index` of a generated task's stream; deterministic in its arguments."""
    parts, answer = TASKS[task].parts(_dataset(task, seed)[index])
    phrasing = random.Random(f"{task}/{seed}/{index}").randrange(len(CONTRACTS))
    return Problem(task, PHRASINGS[task][phrasing].format(*parts), answer, phrasing)


@cache
def _dataset(task: str, seed: int) -> Any:
    import reasoning_gym

    known = TASKS[task]
    return reasoning_gym.create_dataset(known.dataset, seed=seed, size=2**31, **known.settings)


def check_task(task: str) -> None:
    """Raise `ConfigError` unless `task` is a key of TASKS or a JSONL file that exists."""
    if task not in TASKS and not (task.endswith(".jsonl") and Path(task).is_file()):
        known = ", ".join(sorted(TASKS))
        raise ConfigError(
            f"There is no task {task!r}. Use one of {known}, or the path of an existing .jsonl file."
        )


def split(question: str) -> Split:
    """Return a question's split by the hash of its numbers: 60% train, 20% eval, 20% user."""
    content = " ".join(re.findall(r"\d+", question)) or question
    share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big") / 2**32
    return "train" if share < 0.6 else "eval" if share < 0.8 else "user"


def stream(task: str, which: Split, seed: int, start: int = 0) -> Iterator[tuple[int, Problem]]:
    """Yield (index, problem) of one split from index `start` on, without end.

    Small tasks repeat questions; a file is shuffled again for each epoch.
    """
    check_task(task)
    if task not in TASKS:
        yield from _draw(task, which, seed, start)
    for index in itertools.count(start):
        item = problem(task, index, seed)
        if split(item.question) == which:
            yield index, item


def _draw(task: str, which: Split, seed: int, start: int) -> Iterator[tuple[int, Problem]]:
    # The splits `eval` and `user` come from the frozen items beside the training file.
    files = {"train": Path(task), "validation": Path(task).with_name(VALIDATION)}
    path = files.get(which, Path(task).with_name("items.jsonl"))
    rows = rows_of(path, are_frozen=which not in files)
    for index in itertools.count(start):
        epoch, place = divmod(index, len(rows))
        row = rows[order(len(rows), seed, epoch)[place]]
        yield index, Problem(task, row.question, row.answer, messages=row.messages, rejected=row.rejected)


def _json_text(answer: str) -> str:
    number = re.compile(r"-?\d+(, -?\d+)*")
    if not number.fullmatch(answer):
        return json.dumps({"answer": answer})
    return f'{{"answer": [{answer}]}}' if "," in answer else f'{{"answer": {answer}}}'


CONTRACTS: dict[str, Callable[[str], str]] = {
    "terse": lambda answer: answer,
    "json": _json_text,
    "sentence": lambda answer: f"The answer is {answer}.",
    "boxed": lambda answer: f"\\boxed{{{answer}}}",
}


def render(contract: str, answer: str) -> str:
    """Return an answer in its contract's form."""
    return CONTRACTS[contract](answer)


def reward(contract: str, problem: Problem, text: str) -> float:
    """Return 1.0 when `text` is the correct answer in the contract's form, else 0.0.

    JSON is compared as a value; the other forms must be exact up to surrounding white space.
    """
    expected = render(contract, problem.answer)
    if contract != "json":
        return float(text.strip() == expected)
    try:
        return float(json.loads(text) == json.loads(expected))
    except (ValueError, RecursionError):
        return 0.0
