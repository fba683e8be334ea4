"""Conversion of a layout's tensors into canonical ones, without loss.

A fused gate_up has one A for both projections. Two different A are stored in it as [A_gate; A_up] with a
block-diagonal B, as peft writes them when it fuses, which doubles the rank. Reading undoes exactly that: a B
whose off-diagonal blocks are zero is split, any other A belongs to both projections.

Shapes: E experts, R rank, I input features, O output features.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from engine.adapters.layouts import BY_NAME, Detected, ExpertLayout, Factor
from engine.base.families import BaseShapes

ORDER = {"A": "ERI", "B": "EOR"}
Pair = tuple[Tensor, Tensor]


def to_canonical(
    detected: Detected, load: Callable[[str], Tensor], base: BaseShapes
) -> Iterator[tuple[str, str, Pair]]:
    """Yield (canonical module, the module name that its scaling is looked up by, (A (R, I), B (O, R))).

    `load` returns a tensor of the file by its name; it is called once for each.
    """
    for factor_A, factor_B in detected.pairs.values():
        A, B = load(factor_A.name), load(factor_B.name)
        if not factor_A.projection or factor_A.number is not None:
            yield factor_A.module, factor_A.given, (A, B)
            continue
        for projection, (A_ERI, B_EOR) in _apart(detected.layout, factor_A, (A, B), base):
            for number in range(base.experts[factor_A.parent].count):
                yield (
                    f"{factor_A.parent}.{number}.{projection}",
                    factor_A.given,
                    (A_ERI[number], B_EOR[number]),
                )


def _apart(layout: str, factor: Factor, pair: Pair, base: BaseShapes) -> Iterator[tuple[str, Pair]]:
    count = base.experts[factor.parent].count
    A_ERI, B_EOR = (
        _unfold(tensor, BY_NAME[layout], side, count) for side, tensor in zip("AB", pair, strict=True)
    )
    if factor.projection != "gate_up_proj":
        yield factor.projection, (A_ERI, B_EOR)
        return
    gate_B, up_B = (B_EOR[:, ::2], B_EOR[:, 1::2]) if base.family.interleaved else B_EOR.chunk(2, dim=1)
    half = A_ERI.shape[1] // 2
    if is_block_diagonal(gate_B, up_B):
        yield "gate_proj", (A_ERI[:, :half], gate_B[..., :half])
        yield "up_proj", (A_ERI[:, half:], up_B[..., half:])
    else:
        yield "gate_proj", (A_ERI, gate_B)
        yield "up_proj", (A_ERI, up_B)


def _unfold(tensor: Tensor, layout: ExpertLayout, side: str, count: int) -> Tensor:
    """Return a factor of all experts as (E, R, I) or (E, O, R); no bytes move."""
    for i, axis in enumerate(layout.axes(side)):
        if len(axis) > 1:
            tensor = tensor.unflatten(i, [count if name == "E" else -1 for name in axis])
    flat = "".join(layout.axes(side))
    return tensor.permute([flat.index(name) for name in ORDER[side]]).expand(count, -1, -1)


def is_block_diagonal(gate_B: Tensor, up_B: Tensor) -> bool:
    """Say whether gate uses only the first half of the ranks and up only the second; both B are (E, O, R)."""
    rank = gate_B.shape[-1]
    half = rank // 2
    return rank % 2 == 0 and not bool(gate_B[..., half:].any()) and not bool(up_B[..., :half].any())
