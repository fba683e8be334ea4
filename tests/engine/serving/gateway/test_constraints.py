"""What a request wants its answer to be, in the words of four APIs, within bounds."""

import json
from types import SimpleNamespace

import pytest

from engine.errors import Forbidden
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.constraints import MOST_BYTES, constraints_of, own_field

USER = SimpleNamespace(may=lambda *roles: "infer" in roles)
SCORER = SimpleNamespace(may=lambda *roles: bool({"infer", "score"} & {*roles}))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]*$"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
GRAMMAR = 'root ::= "x"'


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"tools": [{"type": "function", "function": {"name": "n", "parameters": SCHEMA}}]},
        {"tools": [{"type": "function", "name": "n", "parameters": SCHEMA}]},
        {"tools": [{"name": "n", "input_schema": SCHEMA}]},
    ],
    ids=["chat", "responses", "messages", "own", "chat tools", "responses tools", "messages tools"],
)
def test_a_schema_is_found_wherever_an_api_has_it(body):
    ((kind, text),) = constraints_of(body, USER)
    assert (kind, json.loads(text)) == ("json", SCHEMA)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"structured_outputs": {"grammar": GRAMMAR}}, "grammar"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag"),
        ({"response_format": TAG}, "structural_tag"),
        ({"text": {"format": TAG}}, "structural_tag"),
        (
            {"tools": [{"type": "custom", "name": "n", "format": {"type": "grammar", "definition": "x"}}]},
            "grammar",
        ),
        (
            {
                "tools": [
                    {"type": "custom", "custom": {"name": "n", "format": {"type": "grammar", "grammar": {}}}}
                ]
            },
            "grammar",
        ),
    ],
)
def test_grammars_take_a_key_that_may(body, kind):
    with pytest.raises(Forbidden, match="'score'"):
        constraints_of(body, USER)
    assert [one.kind for one in constraints_of(body, SCORER)] == [kind]


def test_patterns_and_choices_are_for_everybody():
    assert constraints_of({"structured_outputs": {"regex": "a+"}}, USER) == [("regex", "a+")]
    many = [str(number) for number in range(65)]
    assert constraints_of({"structured_outputs": {"choice": many}}, USER)[0].kind == "choice"
    assert constraints_of({"structured_outputs": {"json": '{"type": "object"}'}}, USER)[0].kind == "json"


PLAIN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "whose"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "more": {"type": "object", "properties": {}, "additionalProperties": False},
    },
    "required": ["name"],
}


def test_what_is_small_and_plain_is_not_tried():
    assert constraints_of({"structured_outputs": {"json": PLAIN}}, USER) == []
    assert constraints_of({"structured_outputs": {"choice": ["a", "b"]}}, USER) == []


@pytest.mark.parametrize(
    "schema",
    [
        PLAIN | {"maxProperties": 7},
        PLAIN | {"properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": 9}}},
        PLAIN | {"properties": {"a": {"items": {"anyOf": [{}, {}]}}}},
        PLAIN | {"additionalProperties": {"$ref": "#"}},
        PLAIN | {"properties": {f"p{number}": {} for number in range(64)}},
        PLAIN | {"enum": [*range(64)]},
        PLAIN | {"description": "x" * 4096},
        PLAIN | {"items": [{"type": "string"}]},
    ],
)
def test_what_is_not_small_or_not_plain_is(schema):
    assert [one.kind for one in constraints_of({"structured_outputs": {"json": schema}}, USER)] == ["json"]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": 7, "text": [], "output_config": "x", "tools": {"a": 1}, "structured_outputs": 1},
        {
            "structured_outputs": {"json_object": True},
            "tools": [{"type": "function", "function": {"name": "n"}}],
        },
        {"messages": []},
        {"tools": [{"name": "n", "input_schema": SCHEMA}], "tool_choice": "none"},
    ],
)
def test_nothing_else_is_compiled(body):
    assert constraints_of(body, USER) == []


def nested(depth: int) -> dict:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        ({"json": nested(40)}, "deeper than 32"),
        ({"json": {"enum": ["x" * MOST_BYTES]}}, f"over {MOST_BYTES} bytes"),
        ({"regex": "a" * (MOST_BYTES + 1)}, f"over {MOST_BYTES} bytes"),
        ({"choice": ["a"] * 1025}, "1025 choices"),
    ],
)
def test_a_constraint_is_bounded(own, fault):
    with pytest.raises(Refused, match=fault) as raised:
        constraints_of({"structured_outputs": own}, SCORER)
    assert raised.value.status == 400


def test_tools_are_bounded_together():
    tool = {"type": "function", "function": {"name": "n", "parameters": {"enum": ["x" * (MOST_BYTES // 2)]}}}
    assert constraints_of({"tools": [tool]}, USER)
    with pytest.raises(Refused, match="'tools'"):
        constraints_of({"tools": [tool, tool]}, USER)


def test_vllms_own_field_has_no_other_keys():
    assert own_field({"json": SCHEMA, "disable_any_whitespace": True}) is None
    assert "whitespace_pattern" in (own_field({"json": SCHEMA, "whitespace_pattern": "a*"}) or "")
    assert own_field("x")
