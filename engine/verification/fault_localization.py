"""Locate the module at fault in a refused revision, by comparing parts of it between engine and trainer.

A part is one projection's factors in some layers and nothing else. The engine gets it from the stored bytes,
the trainer from the revision's own tensors, so a fault in the bytes and one in the engine both show.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.adapters.revision import Tensors
from engine.base.families import EXPERT
from engine.quality.probe import UNKNOWN

LAYER = re.compile(r"(?P<before>.*?\.layers)\.(?P<layer>\d+)\.(?P<after>.+)\.lora_[AB]")
EVERY = "every module"
# Nats between engine and trainer for a part, given its served and its shipped tensors.
Compare = Callable[[Tensors, Tensors], float]


@dataclass(frozen=True)
class FaultLocation:
    """The module most likely at fault, a sentence that says so, and each projection's error in nats."""

    module: str
    says: str
    errors: Mapping[str, float]


def locate_fault(served: Tensors, shipped: Tensors, compare: Compare, tolerance: float) -> FaultLocation:
    """Compare each projection alone, then halve the layers of the worst one.

    Takes at most one comparison for each projection and two for each halving.
    """
    places = {key: place(key) for key in {**served, **shipped}}

    def error(projection: str, layers: Sequence[int]) -> float:
        chosen = {key for key, at in places.items() if at[0] == projection and at[1] in layers}
        parts = ({key: t for key, t in tensors.items() if key in chosen} for tensors in (served, shipped))
        return compare(*parts)

    layers_of = {
        name: sorted({layer for side, layer in places.values() if side == name})
        for name in sorted({name for name, _ in places.values()})
    }
    errors = {name: error(name, layers) for name, layers in layers_of.items()}
    wrong = sorted((name for name in errors if errors[name] > tolerance), key=lambda name: -errors[name])
    if not wrong:
        return FaultLocation(
            UNKNOWN,
            "Each projection alone is reproduced, so the fault cannot be assigned to a module.",
            errors,
        )
    if len(wrong) == len(errors) > 1:
        says = f"Every module is wrong, most of all {wrong[0]} ({errors[wrong[0]]:.2g} nats alone)."
        return FaultLocation(EVERY, says, errors)
    layers = _narrowed(layers_of[wrong[0]], lambda half: error(wrong[0], half) > tolerance)
    module = _named(wrong[0], layers)
    others = f" Also wrong: {', '.join(wrong[1:])}." if len(wrong) > 1 else ""
    return FaultLocation(
        module, f"Most likely {module}, wrong by {errors[wrong[0]]:.2g} nats alone.{others}", errors
    )


def place(key: str) -> tuple[str, int]:
    """Return (projection, layer) of a canonical tensor; all experts of a layer count as one."""
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
