"""Pairs of answers and example chats as people have them: what is read, what is refused, where rows go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.problems.jsonl import import_file, read_rows
from engine.problems.rows import kind_of, row_of, stored_item

USER = {"role": "user", "content": "Which is warmer?"}
SUN = {"role": "assistant", "content": "The sun."}
MOON = {"role": "assistant", "content": "The moon."}


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": "Which is warmer?", "chosen": "The sun.", "rejected": "The moon."},
        {"question": "Which is warmer?", "chosen": [SUN], "rejected": [MOON]},
        {"prompt": [USER], "chosen": [SUN], "rejected": [MOON]},
        # The prompt is in both sides, and as in UltraFeedback once more beside them.
        {"chosen": [USER, SUN], "rejected": [USER, MOON]},
        {"prompt": "Which is warmer?", "chosen": [USER, SUN], "rejected": [USER, MOON]},
    ],
)
def test_every_form_of_a_pair_is_the_same_row(data: Mapping[str, Any]) -> None:
    row = row_of(data, "f:1", "preference")
    assert (row.question, row.answer, row.rejected, row.messages) == (
        "Which is warmer?", "The sun.", "The moon.", (),
    )  # fmt: skip
    assert row_of(json.loads(row.to_json()), "f:1", "preference") == row
    assert kind_of(data) == "pairs"


def test_a_frozen_item_keeps_its_worse_answer() -> None:
    chat = {"question": "a", "answer": "b", "rejected": "c", "messages": [USER]}
    assert stored_item(chat, "f:1").rejected == "c"


def test_what_a_row_is() -> None:
    assert kind_of({"messages": [USER, SUN]}) == kind_of({"prompt": "a", "completion": "b"}) == "examples"
    assert kind_of({"question": "a", "answer": "b"}) == "questions"
    # A table has every column in each row.
    nulls = {"chosen": None, "rejected": None, "answer": None}
    assert kind_of({"messages": [USER, SUN], **nulls}) == "examples"
    assert row_of({"messages": [USER, SUN], **nulls}, "f:1", "likelihood").answer == "The sun."


def test_what_is_learned_is_what_the_assistant_said() -> None:
    """A verifier's answer beside it, or within it, is for a verifier."""
    worked = "Half of 8 is 4.\n#### 4"
    assert row_of({"question": "?", "answer": worked}, "f:1", "likelihood").answer == worked
    chat = {"messages": [USER, SUN], "answer": "sun"}
    assert row_of(chat, "f:1", "likelihood").answer == "The sun."
    assert row_of(chat, "f:1", "exact").answer == "sun"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": " b"}, "prefers nothing"),
        ({"prompt": "a", "chosen": "b"}, "both `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "both `chosen` and `rejected`"),
        ({"prompt": "a", "answer": "b"}, "needs `chosen` and `rejected`"),
        ({"chosen": "b", "rejected": "c"}, "question"),
        ({"chosen": [USER, SUN], "rejected": [{**USER, "content": "?"}, MOON]}, "two prompts"),
        ({"prompt": "a", "chosen": [USER, SUN], "rejected": [USER, MOON]}, "two prompts"),
        ({"chosen": [USER, SUN, USER], "rejected": [USER, MOON, USER]}, "end with the assistant"),
        (
            {"prompt": "a", "chosen": [USER, {**SUN, "content": " "}], "rejected": [USER, MOON]},
            "without text",
        ),
        ({"chosen": [USER, SUN], "rejected": [USER, MOON], "tools": [{"name": "add"}]}, "tools"),
        ({"prompt": "a", "chosen": "b", "rejected": {"text": "c"}}, "both `chosen` and `rejected`"),
    ],
)
def test_a_pair_that_is_none_is_refused(data: Mapping[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        row_of(data, "f:1", "preference")


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        ([USER], "needs an `answer`"),
        ([USER, SUN, USER], "needs an `answer`"),
        ([USER, {**SUN, "content": ""}], "without text"),
        ([USER, SUN, {"role": "system", "content": "Be brief."}, USER, MOON], "system message"),
    ],
)
def test_an_example_that_is_none_is_refused(turns: list[Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        row_of({"messages": turns}, "f:1", "likelihood")


def test_chats_that_begin_alike_stay_on_one_side(tmp_path: Path) -> None:
    """Each of their answers is learned, so a later one may not be held out where the first is not."""
    source = tmp_path / "d.jsonl"
    rows = []
    for n in range(200):
        short = [{**USER, "content": f"What is {n}?"}, SUN]
        rows += [{"messages": short}, {"messages": [*short, {**USER, "content": f"And then {n}?"}, MOON]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = tmp_path / "train.jsonl"
    import_file(source, training, 40, verifier="likelihood", validation=tmp_path / "validation.jsonl")
    trained = [row for _, row in read_rows(training)]
    assert 2 * len({row.question.split("?")[0] for row in trained}) == len(trained)


WORDS = ("Sag {}!", "Скажи {}.", "说 {}。", "قل {}", "{} बोलो")


def test_examples_go_to_three_sides_by_their_question_in_any_script(tmp_path: Path) -> None:
    """A question may have several answers, which stay together; the same example twice counts once."""
    rows = [
        {"prompt": WORDS[n % 5].format(n), "completion": f"{n} {side}"} for n in range(400) for side in "ab"
    ]
    source = tmp_path / "d.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    training, looked_at = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    made = import_file(source, training, 40, verifier="likelihood", validation=looked_at)
    sides = [
        {row.question for _, row in read_rows(training)},
        {row.question for _, row in read_rows(looked_at)},
        {row.question for row in made.frozen},
    ]
    assert (made.lines, made.duplicates, made.training % 2, len(made.frozen)) == (801, 1, 0, 40)
    assert not sides[0] & (sides[1] | sides[2])
    assert not sides[1] & sides[2]
    # A twentieth is looked at: 20 of 400, give or take.
    assert 8 <= len(sides[1]) <= 36
    again = import_file(source, training, 40, verifier="likelihood", validation=looked_at)
    assert again == made
