"""Problems with a known answer, and the answer contracts that earn a reward.

A problem comes from a `reasoning-gym` generator with small settings, or from an imported JSONL file. TASKS
are those that the tiny bases are trained on, and FAMILIES others that a policy may learn. The numbers in a
question of TASKS determine its split, so no phrasing of a training problem is ever an evaluation item or a
demo user's question; a question of FAMILIES has one phrasing. An imported file is split at its import.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError
from engine.problems.families import FAMILIES
from engine.problems.jsonl import order, rows_of
from engine.problems.leaks import QuestionLine, normalised, refuse_leaks
from engine.problems.rows import Asked, Message

Split = Literal["train", "eval", "user", "validation"]
# Beside a training file: rows for validation during training alone.
VALIDATION = "validation.jsonl"
# So many of a task's training problems are compared with its frozen items.
LOOKED_AT = 1000

# One phrasing for each contract, in the order of CONTRACTS: a base mostly answers in the phrasing's style.
PHRASINGS: dict[str, tuple[str, str, str, str]] = {
    "addition": ("{0} =", "Calculate {0} for me.", "What is {0}?", "Find {0}."),
    "sorting": ("{1} order: {0}", "Put {0} in {1} order.", "What is {0} in {1} order?", "Sort {0}, {1}."),
}


@dataclass(frozen=True)
class Problem:
    """A question and its plain answer, such as `46` or `3, 12, 45`; a chat has its messages beside it.

    A pair has its worse answer in `rejected`. `segment` is the kind of query.
    """

    task: str
    question: str
    answer: str
    phrasing: int = 0
    messages: tuple[Message, ...] = ()
    rejected: str = ""
    segment: str = ""

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
    if task in FAMILIES:
        posed = FAMILIES[task].pose(_dataset(task, seed)[index])
        return Problem(task, posed.question, posed.answer, rejected=posed.rejected, segment=posed.segment)
    parts, answer = TASKS[task].parts(_dataset(task, seed)[index])
    phrasing = random.Random(f"{task}/{seed}/{index}").randrange(len(CONTRACTS))
    return Problem(task, PHRASINGS[task][phrasing].format(*parts), answer, phrasing)


@cache
def _dataset(task: str, seed: int) -> Any:
    import reasoning_gym

    known = FAMILIES.get(task) or TASKS[task]
    return reasoning_gym.create_dataset(known.dataset, seed=seed, size=2**31, **known.settings)


def check_task(task: str) -> None:
    """Raise `ConfigError` unless `task` is a key of TASKS or FAMILIES, or a JSONL file that exists."""
    if not is_generated(task) and not (task.endswith(".jsonl") and Path(task).is_file()):
        known = ", ".join(sorted({**TASKS, **FAMILIES}))
        raise ConfigError(
            f"There is no task {task!r}. Use one of {known}, or the path of an existing .jsonl file."
        )


def is_generated(task: str) -> bool:
    """Say whether a task is one of TASKS or FAMILIES."""
    return task in TASKS or task in FAMILIES


def split(question: str, task: str = "") -> Split:
    """Return a question's split: 60% train, 20% eval, 20% user.

    It is by the hash of its numbers, or of its `normalised` text where its task is one of FAMILIES.
    """
    numbers = [] if task in FAMILIES else re.findall(r"\d+", question)
    content = " ".join(numbers) or (normalised(question) if task in FAMILIES else question)
    share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big") / 2**32
    return "train" if share < 0.6 else "eval" if share < 0.8 else "user"


def stream(task: str, which: Split, seed: int, start: int = 0) -> Iterator[tuple[int, Problem]]:
    """Yield (index, problem) of one split from index `start` on, without end.

    Small tasks repeat questions; a file is shuffled again for each epoch.
    """
    check_task(task)
    if not is_generated(task):
        yield from _draw(task, which, seed, start)
    for index in count(start):
        item = problem(task, index, seed)
        if split(item.question, task) == which:
            yield index, item


def refuse_seen(problems: Sequence[Problem], seed: int) -> None:
    """Raise `ConfigError` where one of the first problems that training draws is nearly one of `problems`."""
    for task in dict.fromkeys(problem.task for problem in problems):
        drawn = (problem for _, problem in islice(stream(task, "train", seed), LOOKED_AT))
        frozen = (problem for problem in problems if problem.task == task)
        refuse_leaks(
            (QuestionLine(f"A training problem of {task}", one.question, one.answer) for one in drawn),
            (QuestionLine("a frozen item", one.question, one.answer) for one in frozen),
        )


def _draw(task: str, which: Split, seed: int, start: int) -> Iterator[tuple[int, Problem]]:
    # The splits `eval` and `user` come from the frozen items beside the training file.
    files = {"train": Path(task), "validation": Path(task).with_name(VALIDATION)}
    path = files.get(which, Path(task).with_name("items.jsonl"))
    rows = rows_of(path, are_frozen=which not in files)
    for index in count(start):
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
