"""Which module a refused revision's fault is in: parts of it, asked of the engine and of the trainer.

A part is one projection's factors in some layers and nothing else. The engine gets it from the bytes that it
serves, the trainer from the revision's own tensors, so that a fault shows whether it is in the bytes or in
what the engine does with them. Knows which parts to compare; `compare` knows how one is asked for.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.adapters.revision import Tensors
from engine.base.families import EXPERT
from engine.quality.probe import UNKNOWN

LAYER = re.compile(r"(?P<before>.*?\.layers)\.(?P<layer>\d+)\.(?P<after>.+)\.lora_[AB]")
EVERY = "every module"
# Nats between what the engine serves of a part and what the trainer computes of it.
Compare = Callable[[Tensors, Tensors], float]


@dataclass(frozen=True)
class FaultLocation:
    """The module most likely at fault, the sentence for people, and each projection's error in nats."""

    module: str
    says: str
    errors: Mapping[str, float]


def locate_fault(served: Tensors, shipped: Tensors, compare: Compare, tolerance: float) -> FaultLocation:
    """Compare each projection alone, then halve the layers of the worst one.

    At most one comparison a projection and two a halving.
    """
    places = {key: place(key) for key in {**served, **shipped}}

    def error(projection: str, layers: Sequence[int]) -> float:
        chosen = {key for key, at in places.items() if at[0] == projection and at[1] in layers}
        parts = ({key: t for key, t in tensors.items() if key in chosen} for tensors in (served, shipped))
        return compare(*parts)

    layers_of = {
        name: sorted({layer for found, layer in places.values() if found == name})
        for name in sorted({name for name, _ in places.values()})
    }
    errors = {name: error(name, layers) for name, layers in layers_of.items()}
    wrong = sorted((name for name in errors if errors[name] > tolerance), key=lambda name: -errors[name])
    if not wrong:
        return FaultLocation(
            UNKNOWN, "Each projection alone is reproduced, so no module can be named.", errors
        )
    if len(wrong) == len(errors) > 1:
        says = f"Every module is wrong, {wrong[0]} by most ({errors[wrong[0]]:.2g} nats alone)."
        return FaultLocation(EVERY, says, errors)
    layers = _narrowed(layers_of[wrong[0]], lambda half: error(wrong[0], half) > tolerance)
    module = _named(wrong[0], layers)
    others = f" Wrong too: {', '.join(wrong[1:])}." if len(wrong) > 1 else ""
    return FaultLocation(
        module, f"Most likely {module}, wrong by {errors[wrong[0]]:.2g} nats alone.{others}", errors
    )


def place(key: str) -> tuple[str, int]:
    """Return (projection, layer) of a canonical tensor; all experts of a layer are one place."""
    match = LAYER.fullmatch(key)
    if match is None:
        return key.rpartition(".lora_")[0], 0
    expert = EXPERT.fullmatch(match["after"])
    projection = f"{expert['parent']}.{expert['projection']}" if expert else match["after"]
    return projection, int(match["layer"])


def _narrowed(layers: list[int], is_wrong: Callable[[list[int]], bool]) -> list[int]:
    """Halve the layers while the fault is in one half alone."""
    while len(layers) > 1:
        middle = len(layers) // 2
        wrong = [half for half in (layers[:middle], layers[middle:]) if is_wrong(half)]
        if len(wrong) != 1:
            break
        layers = wrong[0]
    return layers


def _named(projection: str, layers: Sequence[int]) -> str:
    first, last = layers[0], layers[-1]
    where = f"layer {first}" if first == last else f"layers {first} to {last}"
    return f"{projection} of {where}"
