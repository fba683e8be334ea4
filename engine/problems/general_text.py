"""The text of the suite `general`: Python's documentation as CPython ships it, in fixed windows of tokens."""

import hashlib
from collections.abc import Sequence
from functools import cache

GENERAL = "general"
# At most 10,000 tokens. A window fits into `engine.max_model_len` as it is by default.
WINDOWS, WINDOW = 50, 200


@cache
def general_text() -> str:
    """Return the topics of `pydoc_data`, in the order of their names; it differs between CPython versions."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_digest() -> str:
    """Return the text's sha256, which pins the suite's version."""
    return hashlib.sha256(general_text().encode()).hexdigest()


def windows_of(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return up to `WINDOWS` windows of `WINDOW` token ids, spread evenly over the text's."""
    whole = len(tokens) // WINDOW
    count = min(WINDOWS, whole)
    starts = [number * whole // count * WINDOW for number in range(count)]
    return [tuple(tokens[start : start + WINDOW]) for start in starts]
