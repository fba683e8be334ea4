"""A million adapters that all differ, made so fast that making them is not what is measured.

A block of random rows is drawn once. Each round through it flips the signs of another random pattern, so
that every adapter differs from every other in about half of its values, and any one can be made again.

Shapes: N adapters, D elements of an adapter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.base.families import BaseShapes

ROWS = 4096
B_SIZE = 1.0


@dataclass(frozen=True)
class Kind:
    """Which adapters: the projections that carry one, in every layer, and the rank."""

    leaves: tuple[str, ...]
    rank: int


# Of tiny-dense in bfloat16: 7,680 and 37,632 bytes.
KINDS = {
    "7kb": Kind(("q_proj", "gate_proj", "up_proj"), 1),
    "38kb": Kind(("q_proj", "k_proj", "v_proj", "o_proj"), 7),
}


class Maker:
    """Makes the adapter of any number, of one kind and for one base."""

    def __init__(self, base: BaseShapes, kind: Kind, dtype: torch.dtype, seed: int = 0):
        self.kind, self.dtype, self._seed = kind, dtype, seed
        self._shapes: dict[str, tuple[int, int]] = {}
        scales: list[float] = []
        for module, (inputs, outputs) in sorted(base.modules().items()):
            if module.rpartition(".")[2] in kind.leaves:
                self._shapes[f"{module}.lora_A"] = (kind.rank, inputs)
                self._shapes[f"{module}.lora_B"] = (outputs, kind.rank)
                scales += [inputs**-0.5, B_SIZE * kind.rank**-0.5]
        self._sizes = [rows * columns for rows, columns in self._shapes.values()]
        self.nbytes = sum(self._sizes) * dtype.itemsize
        scale_D = torch.repeat_interleave(torch.tensor(scales), torch.tensor(self._sizes))
        drawn_ND = torch.randn(ROWS, sum(self._sizes), generator=self._generator(0))
        self._block_ND = (drawn_ND * scale_D).to(dtype)

    def many(self, start: int, end: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the canonical tensors of the adapters from `start` to `end`, which is left out."""
        while start < end:
            first = start % ROWS
            count = min(end - start, ROWS - first)
            signs_D = self._signs(start // ROWS)
            columns = (self._block_ND[first : first + count] * signs_D).split(self._sizes, dim=1)
            shaped = zip(columns, self._shapes.values(), strict=True)
            rows = zip(*(column.unflatten(1, shape).unbind(0) for column, shape in shaped), strict=True)
            yield from (dict(zip(self._shapes, row, strict=True)) for row in rows)
            start += count

    def one(self, number: int) -> dict[str, torch.Tensor]:
        return next(self.many(number, number + 1))

    def _signs(self, turn: int) -> torch.Tensor:
        drawn = torch.randint(0, 2, (sum(self._sizes),), generator=self._generator(turn + 1))
        return (1 - 2 * drawn).to(self.dtype)

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed * 1_000_003 + stream)


def adapter_bytes(base: BaseShapes, kind: Kind, dtype: torch.dtype) -> int:
    """Return how many bytes the tensors of an adapter have."""
    sizes = (sum(size) for name, size in base.modules().items() if name.rpartition(".")[2] in kind.leaves)
    return sum(sizes) * kind.rank * dtype.itemsize
