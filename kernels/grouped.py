"""LoRA for rows of many adapters on CPU: grouped by slot, shrunk by one batched product, expanded by bags.

Rows are sorted by slot and cut into tiles of one slot each, so that a shrink factor is read once a tile
and not once a row. To expand, each row takes a weighted sum of its slot's lines, which copies no factor.
Rows without an adapter are in no tile: their output is not touched, bit for bit. A row's bits do not
depend on its batch in float32; in bfloat16 oneDNN rounds about one shrunk value of 4,000 another way in
tiles of another size (none seen in most shapes).

Shapes: N rows, L rows with an adapter, K tiles, T rows a tile, I input features, O output features,
R rank, S slots, M slices of a fused module, C chunks of O, each as wide as all slices' common divisor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

# The BLAS sums in one order from four rows on and in another for fewer: with tiles of fewer rows, the
# last digits of a row would depend on its batch.
TILES = (4, 8, 16, 32, 64, 128, 256)
# Reading a slot's factors for one more tile costs about as much as computing this many rows.
TILE_COST_ROWS = 4


@dataclass(frozen=True)
class Plan:
    """Which row goes where; made once a step and used by every layer.

    `gather` (K*T) are row indices, with padding that repeats a row; `keep` (L) are the positions of
    `gather` that are not padding (None: all); `scatter` (L) are their rows (None: all, in order) and
    `row_slots` (L) their slots; `slots` (K) are the tiles' slots, a slice when they are adjacent and rise
    by one (no factor is copied then).
    """

    gather: Tensor | None
    keep: Tensor | None
    scatter: Tensor | None
    slots: slice | Tensor
    tiles: int
    tile: int
    row_slots: Tensor
    _lines: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def lines(self, rank: int, chunks: int) -> Tensor:
        """Return the lines (L * C, R) of a table (S * R * C) that make each row's chunks."""
        if (rank, chunks) not in self._lines:
            first_LR = self.row_slots[:, None] * rank + torch.arange(rank)
            lines_LCR = first_LR[:, None] * chunks + torch.arange(chunks)[:, None]
            self._lines[rank, chunks] = lines_LCR.flatten(0, 1)
        return self._lines[rank, chunks]


def plan(slots: Sequence[int]) -> Plan | None:
    """Group rows by slot; `slots[row]` < 0 means no adapter. None when no row has one."""
    groups: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot >= 0:
            groups.setdefault(slot, []).append(row)
    if not groups:
        return None
    order = sorted(groups)
    tile = _tile([len(groups[slot]) for slot in order])
    gather: list[int] = []
    keep: list[int] = []
    tile_slots: list[int] = []
    for slot in order:
        rows = groups[slot]
        for start in range(0, len(rows), tile):
            part = rows[start : start + tile]
            keep.extend(range(len(gather), len(gather) + len(part)))
            gather.extend(part)
            gather.extend(part[:1] * (tile - len(part)))
            tile_slots.append(slot)
    padded = len(keep) < len(gather)
    identity = gather == list(range(len(slots)))
    adjacent = tile_slots == list(range(tile_slots[0], tile_slots[0] + len(tile_slots)))
    return Plan(
        gather=None if identity else torch.tensor(gather),
        keep=torch.tensor(keep) if padded else None,
        scatter=None if identity else torch.tensor([gather[i] for i in keep]),
        slots=slice(tile_slots[0], tile_slots[-1] + 1) if adjacent else torch.tensor(tile_slots),
        tiles=len(tile_slots),
        tile=tile,
        row_slots=torch.tensor([slots[gather[i]] for i in keep]),
    )


def add_lora(
    y_NO: Tensor, x_NI: Tensor, a_SMRI: Tensor, b_SRO: Tensor, widths: Sequence[int], plan: Plan
) -> None:
    """Add every row's LoRA product to `y` in place.

    `a_SMRI` (S, M, R, I) holds the shrink factors of the module's slices, `b_SRO` (S, R, O) their
    expand factors side by side, `widths` the slices' shares of O. Equals `naive.add_lora` for each
    slice up to the order of sums.
    """
    rank = a_SMRI.shape[2]
    x_KTI = (x_NI if plan.gather is None else x_NI.index_select(0, plan.gather)).view(
        plan.tiles, plan.tile, -1
    )
    h_LX = torch.bmm(x_KTI, a_SMRI[plan.slots].flatten(1, 2).transpose(1, 2)).flatten(0, 1)
    if plan.keep is not None:
        h_LX = h_LX.index_select(0, plan.keep)
    chunk = math.gcd(*widths)
    if len(widths) > 1:
        slice_of_chunk = [i for i, width in enumerate(widths) for _ in range(width // chunk)]
        h_LX = h_LX.unflatten(1, (-1, rank))[:, slice_of_chunk]
    delta_LO = embedding_bag(
        plan.lines(rank, b_SRO.shape[2] // chunk),
        b_SRO.view(-1, chunk),
        per_sample_weights=h_LX.reshape(-1, rank),
        mode="sum",
    ).view(len(plan.row_slots), -1)
    if plan.scatter is None:
        y_NO += delta_LO
    else:
        y_NO.index_add_(0, plan.scatter, delta_LO)


def _tile(counts: Sequence[int]) -> int:
    """Choose the tile that costs least: rows computed, padding included, plus factors read."""
    sizes = [*TILES, max(*TILES[:1], *counts)]

    def cost(size: int) -> int:
        return sum(-(-count // size) for count in counts) * (size + TILE_COST_ROWS)

    return min(sizes, key=cost)
