"""Problems: repeatable, split without leaks, rewarded by an exact contract."""

import json
import math
import re
from itertools import islice

import pytest

from engine.errors import ConfigError
from engine.problems.families import FAMILIES
from engine.problems.leaks import normalised
from engine.problems.procedural import CONTRACTS, TASKS, problem, render, reward, split, stream


@pytest.mark.parametrize("task", TASKS)
def test_a_stream_is_repeatable_and_can_go_on(task: str):
    first = list(islice(stream(task, "train", 3), 40))
    assert first == list(islice(stream(task, "train", 3), 40))
    index = first[19][0] + 1
    assert list(islice(stream(task, "train", 3, index), 20)) == first[20:]
    assert problem(task, first[0][0], 4) != first[0][1]


@pytest.mark.parametrize("task", FAMILIES)
def test_a_family_is_repeatable_short_and_split_by_all_that_it_asks(task: str):
    drawn = {which: list(islice(stream(task, which, 5), 100)) for which in ("train", "eval", "user")}
    assert drawn["eval"] == list(islice(stream(task, "eval", 5), 100))
    asked = {which: {normalised(one.question) for _, one in rows} for which, rows in drawn.items()}
    assert not asked["train"] & asked["eval"]
    assert not asked["user"] & (asked["train"] | asked["eval"])
    problems = [one for rows in drawn.values() for _, one in rows]
    assert all(one.segment and one.answer and one.rejected != one.answer for one in problems)
    # A character is a token at most, and a tiny base has 256 positions.
    assert max(len(one.question + one.answer) for one in problems) < 80


def test_the_answers_of_families_are_right():
    for name, check in CHECKS.items():
        for _, one in islice(stream(name, "eval", 1), 40):
            assert check(one.question) == one.answer, (name, one)


def rotated(question: str) -> str:
    degrees, grid = question.removeprefix("rotate ").split(": ")
    rows = grid.split("/")
    for _ in range(int(degrees) // 90):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
    return "/".join(rows)


def gated(question: str) -> str:
    """By Python's own operators: `|` is NAND, `_` NOR, and `~` behind a value negates it."""
    text = re.sub(r"([01])~", lambda found: str(1 - int(found[1])), question.removeprefix("gate "))
    inner = re.sub(r"\(([01])(.)([01])\)", lambda found: str(gate(found[2], found[1] + found[3])), text)
    return str(gate(next(sign for sign in inner if sign not in "01"), re.sub(r"[^01]", "", inner)))


def gate(sign: str, values: str) -> int:
    ones, all_ones = values.count("1"), "0" not in values
    return int({"&": all_ones, "^": ones % 2 == 1, "|": not all_ones, "_": ones == 0, "+": ones > 0}[sign])


CHECKS = {
    "chain": lambda question: str(eval(question.removeprefix("sum "))),
    "gcd": lambda question: str(math.gcd(*map(int, question.split()[1:]))),
    "bits": lambda question: str(question.count("1")),
    "rotation": rotated,
    "circuit": gated,
}


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_question_in_any_phrasing(task: str):
    """Two routes: no rendered question is shared, and no set of operands either."""
    seen = {which: list(islice(stream(task, which, 5), 300)) for which in ("train", "eval", "user")}
    questions = {which: {item.question for _, item in rows} for which, rows in seen.items()}
    assert not questions["train"] & questions["eval"]
    assert not questions["train"] & questions["user"]
    assert not questions["eval"] & questions["user"]
    assert all(split(question) == which for which, asked in questions.items() for question in asked)


def test_the_answer_is_the_answer():
    for _, item in islice(stream("addition", "eval", 1), 50):
        left, _, right = next(word for word in (item.question,) if "+" in word).partition("+")
        digits = ["".join(c for c in side if c.isdigit()) for side in (left, right)]
        assert int(item.answer) == int(digits[0]) + int(digits[1])
    for _, item in islice(stream("sorting", "eval", 1), 50):
        numbers = [int(number) for number in item.answer.split(",")]
        assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_each_contract_pays_for_its_own_form_alone(contract: str):
    item = problem("addition", 0, 1)
    for form in CONTRACTS:
        assert reward(contract, item, render(form, item.answer)) == float(form == contract)
    assert reward(contract, item, render(contract, item.answer) + "0") == 0.0
    assert reward(contract, item, "") == 0.0


def test_json_is_compared_as_a_value():
    item = problem("sorting", 0, 1)
    spaced = json.dumps(json.loads(render("json", item.answer)), indent=2)
    assert reward("json", item, spaced) == 1.0
    assert reward("json", item, spaced[:-1]) == 0.0
    # Python's parser gives up on it with another error than a ValueError.
    assert reward("json", item, "[" * 100_000) == 0.0


def test_unknown_tasks_are_told_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"addition, .*sorting"):
        next(stream("poetry", "train", 0))
    with pytest.raises(ConfigError, match="no task"):
        next(stream(str(tmp_path / "gone.jsonl"), "train", 0))
