"""How large and how deep a body may be, before anything walks through it: all of that stops the event loop.

A body of 8 MiB of empty lists takes seconds to parse. What a client without the roles `score` and `train`
sends has to fit the base's context, so its bound follows from that.
"""

from typing import Any

from engine.serving.gateway.asgi import Refused, parse

# Bytes of a body beside its text, and those of a token at most: most have four, a run of spaces many.
OTHER_BYTES, TOKEN_BYTES = 256 << 10, 64
# Lists and objects of a body; a text may have brackets, too.
MOST_BRACKETS = 1 << 16
# Values of a body beside those of a context full of token ids.
OTHER_VALUES = 1 << 16
MOST_DEPTH = 64


def most_bytes(context: int) -> int:
    """Return the bytes of the largest body whose prompt may fit a context of so many tokens."""
    return OTHER_BYTES + TOKEN_BYTES * context


def parse_within(raw: bytes, context: int | None) -> dict[str, Any]:
    """Return a body as a JSON object.

    `context`: the tokens that its prompts may have; None: as many as its bytes allow. Raises `Refused`: 413
    where it would take too long to parse, 400 for what is no JSON object or is nested too deeply.
    """
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MOST_BRACKETS:
        raise Refused(413, f"The request body has {brackets} brackets; the most is {MOST_BRACKETS}.")
    if context is not None and (values := raw.count(b",") + brackets) > OTHER_VALUES + context:
        raise Refused(413, f"The request body has {values} values; the most is {OTHER_VALUES + context}.")
    body = parse(raw)
    if brackets > MOST_DEPTH and is_deeper(body, MOST_DEPTH):
        raise Refused(400, f"The request body is nested deeper than {MOST_DEPTH} lists and objects.")
    return body


def is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested in each other more than `most` times."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return bool(level)
