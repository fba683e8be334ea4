"""Random JSON for fuzz tests: values of every kind, and bodies that are right but for a field."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any


def text(rng: random.Random, most: int) -> str:
    """Return up to `most` characters, half of them ASCII."""
    codes = (rng.choice((rng.randrange(128), rng.randrange(0xD800))) for _ in range(rng.randrange(most)))
    return "".join(map(chr, codes))


def value(rng: random.Random, known: Sequence[Any], depth: int = 2) -> Any:
    """Return any JSON value; a third are `known` ones."""
    if rng.random() < 0.3:
        return rng.choice(known)
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [value(rng, known, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 6:
        return {text(rng, 8): value(rng, known, depth - 1) for _ in range(rng.randrange(5))}
    leaves = (None, rng.random() < 0.5, rng.randint(-(1 << 63), (1 << 63) - 1), rng.gauss(0, 1e3))
    return [*leaves, text(rng, 20)][kind]


def body(rng: random.Random, good: Mapping[str, Any]) -> bytes:
    """Return a body with some of the fields of `good`, right or not; or any other JSON, or any bytes."""
    known = [*good.values()]
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(64))
    if rng.random() < 0.1:
        return json.dumps(value(rng, known)).encode()
    names = [name for name in good if rng.random() < 0.5]
    fields = {name: good[name] if rng.random() < 0.6 else value(rng, known) for name in names}
    if rng.random() < 0.1:
        fields[text(rng, 8)] = value(rng, known)
    return json.dumps(fields).encode()
