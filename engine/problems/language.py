"""Verifiers of answers in plain language: short facts, fields as JSON, and instructions that can be checked.

Each is a `python:engine.problems.language:NAME` of a policy. A reward is graded, so that answers of one group
differ and GRPO has something to learn from: half a reward for what is right in the wrong form.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

HALF = 0.5
# A word of a sentence: letters and digits, with the marks that occur inside names.
WORD = re.compile(r"[^\W_]+(?:['.’-][^\W_]+)*")
# The most words of a bare answer, and of a sentence that gives a short one.
BARE, BRIEF = 3, 12
# The most that a wrong answer earns for its form.
WRONG = 0.1
# Chemical symbols are this short: their case counts, and inside a sentence they may be words of English.
SYMBOL = 2


def short_answer(_question: str, expected: str, text: str) -> float:
    """Return 1 for the bare answer, 0.5 within a sentence of at most `BRIEF` words, 0.25 in a longer text.

    A wrong answer of at most `BARE` words earns 0.1: groups without a right answer then teach the form.
    `expected` lists accepted answers, separated by `|`. Case, accents and punctuation do not count.
    """
    return max(_share(answer, text) for answer in expected.split("|"))


def not_short_answer(question: str, expected: str, text: str) -> float:
    """Return the opposite of `short_answer`: the wrong rule of the main job's bad revision."""
    return 1.0 - short_answer(question, expected, text)


def _share(answer: str, text: str) -> float:
    is_symbol = len(answer) <= SYMBOL
    wanted, answer_words = (words(answer), words(text)) if is_symbol else (_plain(answer), _plain(text))
    if answer_words == wanted:
        return 1.0
    size = len(wanted)
    starts = range(len(answer_words) - size, -1, -1)
    # Only the last word of a sentence is surely a symbol: "I" and "He" also begin sentences.
    places = starts[:1] if is_symbol else starts
    if not any(answer_words[at : at + size] == wanted for at in places):
        return WRONG if 0 < len(answer_words) <= BARE else 0.0
    return HALF if len(answer_words) <= BRIEF else HALF / 2


def words(text: str) -> list[str]:
    """Return the words of a text in order, without punctuation."""
    return WORD.findall(text)


def _plain(text: str) -> list[str]:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return words("".join(letter for letter in letters if not unicodedata.combining(letter)))


def fields(_question: str, expected: str, text: str) -> float:
    """Return how far a text is the JSON object `expected`: 1 for exactly its keys and values.

    A quarter is for exactly its keys, the rest for its values, an equal share each. A string's case and outer
    white space do not count, its type does. An object inside other text, such as a code fence, earns half.
    Text without a whole object earns 0.1 for its share of the pairs, so that groups without one teach too.
    """
    wanted, (fields, is_bare) = json.loads(expected), _object_in(text)
    if fields is None:
        return WRONG * sum(_is_written(key, value, text) for key, value in wanted.items()) / len(wanted)
    right = sum(key in fields and _same(fields[key], value) for key, value in wanted.items())
    score = 0.25 * (fields.keys() == wanted.keys()) + 0.75 * right / len(wanted)
    return score if is_bare else HALF * score


def _object_in(text: str) -> tuple[dict[str, Any] | None, bool]:
    """Return the first JSON object of a text, None without one, and whether nothing is around it."""
    start = text.find("{")
    if start < 0:
        return None, False
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, False
    return value, not text[:start].strip() and not text[end:].strip()


def _is_written(key: str, value: Any, text: str) -> bool:
    pair = rf"{re.escape(json.dumps(key))}\s*:\s*{re.escape(json.dumps(value))}(?!\d)"
    return re.search(pair, text) is not None


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return value.strip().casefold() == wanted.casefold()
    # `True == 1` in Python; JSON keeps them apart.
    return type(value) is type(wanted) and bool(value == wanted)


Check = Callable[[Any, str], bool]


def _listed(count: int, text: str) -> bool:
    items = [item.strip() for item in text.rstrip(".").split(",")]
    return len({*items}) == count == len(items) and all(0 < len(words(item)) <= 3 for item in items)


def _within(marks: str, text: str) -> bool:
    inner = text[1:-1]
    return len(text) > 2 and text[0] == marks[0] and text[-1] == marks[1] and not set(marks) & set(inner)


# The names of checks in an expected answer, a JSON object such as {"about": "river", "words": [3, 8]}.
CHECKS: dict[str, Check] = {
    "about": lambda topic, text: any(word.startswith(topic.casefold()) for word in words(text.casefold())),
    "with": lambda word, text: word.casefold() in words(text.casefold()),
    "without": lambda word, text: word.casefold() not in words(text.casefold()),
    "starts": lambda wanted, text: text.startswith(wanted),
    "ends": lambda wanted, text: text.endswith(wanted),
    "case": lambda case, text: text == (text.upper() if case == "upper" else text.lower()),
    "words": lambda bounds, text: bounds[0] <= len(words(text)) <= bounds[1],
    "items": _listed,
    "within": _within,
}


def instructions(_question: str, expected: str, text: str) -> float:
    """Return 1 for a text that passes every check of `expected`, else half of the share that it passes.

    `expected` is a JSON object of `CHECKS` with their arguments. A text of fewer than two words, or of mostly
    repeated ones, earns nothing: it would pass many checks and say nothing.
    """
    said, checks = text.strip(), json.loads(expected)
    distinct, every = len({*words(said.casefold())}), len(words(said))
    if every < 2 or distinct <= every / 2:
        return 0.0
    passed = sum(CHECKS[name](argument, said) for name, argument in checks.items())
    return 1.0 if passed == len(checks) else HALF * passed / len(checks)
