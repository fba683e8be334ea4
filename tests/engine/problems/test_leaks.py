"""Leaks: what asks the same is found, and what only looks like it is not."""

import pytest

from engine.errors import ConfigError
from engine.problems.leaks import QuestionLine, refuse_leaks

LONG = "Say in one word who wrote the play about the prince of Denmark and his father's ghost"


def lines(*asked: tuple[str, str]) -> list[QuestionLine]:
    return [QuestionLine(f"line {number}", *one) for number, one in enumerate(asked)]


@pytest.mark.parametrize(
    ("trained", "frozen"),
    [
        (("What is 2 + 3?", "5"), ("what is  2+3", "5")),
        (("\u201cYes\u201d, or no", "no"), ("Yes or NO.", "No")),
        ((LONG, "Shakespeare"), (LONG.replace("wrote", "wrotte"), "Shakespeare")),
        ((LONG, "Shakespeare"), (f"Please: {LONG}?", "Shakespeare")),
    ],
)
def test_the_same_question_is_refused_with_both_lines(
    trained: tuple[str, str], frozen: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"line 1 is line 0, or nearly.*1 such lines"):
        refuse_leaks(lines(("other", "5"), trained), lines(frozen))


@pytest.mark.parametrize(
    ("trained", "frozen"),
    [
        (("2 + 3", "5"), ("2 + 4", "5")),
        (("2 - 3", "5"), ("2 + 3", "5")),
        (("1.5", "x"), ("15", "x")),
        (("What is the capital of France?", "?"), ("What is the capital of Spain?", "?")),
        # Another answer: another filling of a long template, or another question on one passage.
        ((f"{LONG}: a", "yes"), (f"{LONG}: b", "no")),
        (("!", "exclamation mark"), ("?", "question mark")),
    ],
)
def test_what_asks_something_else_is_trained_on(trained: tuple[str, str], frozen: tuple[str, str]) -> None:
    refuse_leaks(lines(trained), lines(frozen))


def test_fillings_of_a_template_are_no_near_duplicates_of_each_other() -> None:
    words = ["apple", "river", "stone", "cloud", "tiger", "piano", "bread", "glass"]
    fillings = [(f"{LONG}, and is this one of its words or none of them: {word}", "no") for word in words]
    refuse_leaks(lines(*fillings[:4]), lines(*fillings[4:]))
