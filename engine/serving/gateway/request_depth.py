"""How deep lists and objects of a body may be nested, before anything walks through them."""

from typing import Any

MOST_DEPTH = 64


def is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested in each other more than `most` times."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return bool(level)
