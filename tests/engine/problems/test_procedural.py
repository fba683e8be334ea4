"""Problems: repeatable, split without leaks, rewarded by an exact contract."""

import json
from itertools import islice

import pytest

from engine.errors import ConfigError
from engine.problems.procedural import CONTRACTS, TASKS, problem, render, reward, split, stream


@pytest.mark.parametrize("task", TASKS)
def test_a_stream_is_repeatable_and_can_go_on(task: str):
    first = list(islice(stream(task, "train", 3), 40))
    assert first == list(islice(stream(task, "train", 3), 40))
    index = first[19][0] + 1
    assert list(islice(stream(task, "train", 3, index), 20)) == first[20:]
    assert problem(task, first[0][0], 4) != first[0][1]


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
    with pytest.raises(ConfigError, match="addition, sorting"):
        next(stream("poetry", "train", 0))
    with pytest.raises(ConfigError, match="no task"):
        next(stream(str(tmp_path / "gone.jsonl"), "train", 0))
