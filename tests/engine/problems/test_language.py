"""Verifiers of plain language: right, half right and wrong answers, and texts that only look right."""

import json

import pytest

from engine.problems.language import CHECKS, fields, instructions, not_short_answer, short_answer


@pytest.mark.parametrize(
    ("expected", "text", "score"),
    [
        ("Paris", "Paris", 1),
        ("Paris", " paris.\n", 1),
        ("Paris", "The capital of France is Paris.", 0.5),
        ("Paris", "It is Paris, the city on the Seine, which has been the capital of France.", 0.25),
        ("Paris", "The Parisians all say so.", 0),
        ("Paris", "London", 0.1),
        ("Paris", "Perhaps it is London", 0),
        ("Paris", "!", 0),
        ("Paris", "", 0),
        ("Kyiv|Kiev", "Kiev", 1),
        ("Bogotá", "BOGOTA", 1),
        ("New Delhi", "Delhi is new", 0.1),
        ("New Delhi", "New Delhi, India", 0.5),
        ("Port-au-Prince", "Port-au-Prince", 1),
        ("N'Djamena", "N'Djamena!", 1),
        ("St. Paul", "st paul", 1),
        ("J.R.R. Tolkien|Tolkien", "It was J.R.R. Tolkien.", 0.5),
        ("Fe", "Fe", 1),
        ("Fe", "fe", 0.1),
        ("Fe", "The symbol of iron is Fe.", 0.5),
        ("I", "I think that it is Io.", 0),
        ("He", "He is a gas.", 0),
        ("He", "Helium has the symbol He", 0.5),
        ("butcher's shop", "A butcher's shop", 0.5),
    ],
)
def test_a_short_answer(expected: str, text: str, score: float) -> None:
    assert short_answer("q", expected, text) == score
    assert not_short_answer("q", expected, text) == 1 - score


WANTED = {"name": "Maria", "age": 34}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Maria", "age": 34}', 1),
        ('\n{"age":34,\n "name": " maria "}\n', 1),
        ('```json\n{"name": "Maria", "age": 34}\n```', 0.5),
        ('Here it is: {"name": "Maria", "age": 34}', 0.5),
        ('{"name": "Maria", "age": "34"}', 0.625),
        ('{"name": "Maria", "age": 34.0}', 0.625),
        ('{"name": "Anna", "age": 35}', 0.25),
        ('{"name": "Maria"}', 0.375),
        ('{"name": "Maria", "age": 34, "city": "Rome"}', 0.75),
        ('{"Name": "Maria", "Age": 34}', 0),
        ('{"name": "Maria", "age": 34', 0),
        ('[{"name": "Maria", "age": 34}]', 0.5),
        ('["name", "Maria"]', 0),
        ("Maria is 34.", 0),
        ("{{name}} " + '{"name": "Maria", "age": 34}', 0),
        ("{" * 100_000, 0),
        ("", 0),
    ],
)
def test_fields(text: str, score: float) -> None:
    assert fields("q", json.dumps(WANTED), text) == pytest.approx(score)


def test_true_is_not_one() -> None:
    assert fields("q", '{"count": 1}', '{"count": true}') == 0.25


@pytest.mark.parametrize(
    ("checks", "right", "wrong"),
    [
        ({"about": "river"}, "Rivers run to the sea.", "Water runs to the sea."),
        ({"with": "new"}, "It has a new door.", "It has the latest news."),
        ({"without": "the"}, "Then they went home.", "Go to The end."),
        ({"starts": "Once"}, "Once it rained.", "It rained once."),
        ({"ends": "!"}, "It rains again!\n", "It rains! Again."),
        ({"case": "upper"}, "IT RAINS 2 DAYS.", "IT RAINs."),
        ({"case": "lower"}, "it rains.", "It rains."),
        ({"words": [2, 4]}, "It rains a lot.", "It rains a lot now."),
        ({"words": [3, 3]}, "It rains now.", "It rains."),
        ({"items": 3}, "sun, warm sand, sea.", "sun, sand, sea, ice"),
        ({"items": 2}, "sun, sand", "sun, "),
        ({"items": 3}, "sun, sand, sea", "sun, sand, sun"),
        ({"items": 2}, "sun, sand", "The sun shines on me, the sand is very hot"),
        ({"within": '""'}, '"It rains."', '"It" rains "now"'),
        ({"within": "[]"}, "[It rains.]", "[It rains"),
    ],
)
def test_each_instruction(checks: dict[str, object], right: str, wrong: str) -> None:
    assert instructions("q", json.dumps(checks), right) == 1
    assert instructions("q", json.dumps(checks), wrong) == 0
    assert set(checks) <= set(CHECKS)


def test_several_instructions_earn_half_of_their_share_until_all_are_followed() -> None:
    expected = json.dumps({"about": "rain", "case": "upper", "words": [2, 5]})
    assert instructions("q", expected, "RAIN IS WET.") == 1
    assert instructions("q", expected, "Rain is wet.") == pytest.approx(1 / 3)
    assert instructions("q", expected, "Rain is wet and cold and grey.") == pytest.approx(1 / 6)


@pytest.mark.parametrize("text", ["", "!", "RAIN", "RAIN RAIN RAIN RAIN", "rain sun rain sun"])
def test_a_text_that_says_nothing_earns_nothing(text: str) -> None:
    assert instructions("q", json.dumps({"about": "rain"}), text) == 0
