"""What an answer is constrained by: JSON schemas, patterns and grammars, each of which the engine compiles.

A compilation takes from milliseconds to minutes, and nothing in vLLM ends one. So what constrains an answer
is bounded here, and what is neither small nor plain is compiled first where it can be killed
(`GrammarTrial`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from engine.catalog.catalog import Key
from engine.errors import Forbidden
from engine.serving.gateway.answers import mapping, mappings
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.request_depth import is_deeper

# Of all constraints of a request together. A schema of 64 KiB has over a thousand properties.
MOST_BYTES = 64 << 10
MOST_DEPTH = 32
MOST_CHOICES = 1024
# Of a schema that is not tried: its values, and the words that it is made of. None of them repeats anything.
PLAIN_VALUES, PLAIN_BYTES = 64, 4096
PLAIN_WORDS = frozenset(
    (
        "type",
        "properties",
        "required",
        "items",
        "enum",
        "const",
        "title",
        "description",
        "additionalProperties",
    )
)
# Kinds that describe any language at all. They take a key with this role.
GRAMMARS, GRAMMAR_ROLE = ("grammar", "structural_tag"), "score"
# Of vLLM's own field. Its `whitespace_pattern` is a regular expression, too, and is not served.
OWN = ("json", "regex", "choice", *GRAMMARS)
SWITCHES = frozenset({"json_object", "disable_any_whitespace", "disable_additional_properties"})
# Fields that may constrain an answer, in the words of four APIs.
FIELDS = frozenset({"response_format", "structured_outputs", "text", "output_config", "tools"})


class Constraint(NamedTuple):
    """One thing to compile: `kind` is of `OWN`, `text` the schema, choices or tag as JSON, else as it is."""

    kind: str
    text: str


def own_field(value: Any) -> str | None:
    """Check vLLM's `structured_outputs`: one constraint of those that are served."""
    if not isinstance(value, dict):
        return "must be an object"
    unknown = value.keys() - SWITCHES - set(OWN)
    if unknown:
        return f"has no {min(unknown)[:40]!r} here; it takes {', '.join(sorted([*OWN, *SWITCHES]))}"
    return None


def constraints_of(body: Mapping[str, Any], key: Key) -> list[Constraint]:
    """Return what has to be tried of what a checked request wants its answer to be.

    Raises `Refused` (400) for what is larger, deeper or has more choices than the bounds, and `Forbidden` for
    a grammar of a key without the role for it.
    """
    if not FIELDS & body.keys():
        return []
    constraints, size = [], 0
    for kind, value in _values(body):
        if kind in GRAMMARS and not key.may(GRAMMAR_ROLE):
            raise Forbidden(
                f"A {kind!r} takes a key with the role {GRAMMAR_ROLE!r}. "
                "Use a JSON schema, 'regex' or 'choice'."
            )
        if is_deeper(value, MOST_DEPTH):
            raise _refused(kind, f"is nested deeper than {MOST_DEPTH} lists and objects")
        if isinstance(value, list) and len(value) > MOST_CHOICES:
            raise _refused(kind, f"has {len(value)} choices; the most is {MOST_CHOICES}")
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        size += len(text.encode())
        if size > MOST_BYTES:
            raise _refused("tools" if "tools" in body else kind, f"has over {MOST_BYTES} bytes")
        if not (len(text) <= PLAIN_BYTES and is_plain(kind, value)):
            constraints.append(Constraint(kind, text))
    return constraints


def is_plain(kind: str, value: Any) -> bool:
    """Return whether a constraint of few bytes compiles in milliseconds whatever it says."""
    if kind == "choice":
        return isinstance(value, list) and len(value) <= PLAIN_VALUES
    if kind != "json" or not isinstance(value, dict):
        return False
    schemas, values = [value], 0
    while schemas:
        schema = schemas.pop()
        if not isinstance(schema, dict) or not schema.keys() <= PLAIN_WORDS:
            return False
        schemas.extend(mapping(schema.get("properties")).values())
        inner = (schema.get(name) for name in ("items", "additionalProperties"))
        schemas.extend(one for one in inner if not isinstance(one, bool | None))
        enum = schema.get("enum")
        values += 1 + (len(enum) if isinstance(enum, list) else 0)
        if values + len(schemas) > PLAIN_VALUES:
            return False
    return True


def _values(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    formats = (
        body.get("response_format"),
        mapping(body.get("text")).get("format"),
        mapping(body.get("output_config")).get("format"),
    )
    for wanted in map(mapping, formats):
        if wanted.get("type") == "structural_tag":
            yield "structural_tag", wanted
        elif wanted.get("type") == "json_schema":
            inner = mapping(wanted.get("json_schema"))
            yield "json", inner.get("schema") or inner.get("json_schema") or wanted.get("schema") or {}
    own = mapping(body.get("structured_outputs"))
    yield from ((kind, own[kind]) for kind in OWN if own.get(kind) is not None)
    for tool in mappings(body.get("tools")) if body.get("tool_choice") != "none" else ():
        inner = mapping(tool.get("function")) or tool
        schema = inner.get("parameters") or inner.get("input_schema")
        if schema:
            yield "json", schema
        custom = mapping(inner.get("format")) or mapping(mapping(tool.get("custom")).get("format"))
        if custom.get("type") == "grammar":
            yield "grammar", custom.get("definition") or custom


def _refused(kind: str, fault: str) -> Refused:
    return Refused(400, f"What constrains the answer ({kind!r}) {fault}.", "invalid_value", kind)
