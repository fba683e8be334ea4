"""LoRA for rows of many adapters on CPU: rows grouped by slot, one batched product per factor.

Rows are sorted by slot and cut into tiles of one slot each, so that a factor is read once a tile
and not once a row. Rows without an adapter are in no tile: their output is not touched, bit for bit.

Shapes: N rows, K tiles, T rows a tile, I input features, O output features, R rank, S slots,
M slices of a fused module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Reading a slot's factors for one more tile costs about as much as computing this many rows.
TILE_COST_ROWS = 4


@dataclass(frozen=True)
class Plan:
    """Which row goes where; made once a step and used by every layer.

    `gather` (K*T) are row indices, with padding that repeats a row; `keep` are the positions of
    `gather` that are not padding (None: all); `scatter` are their rows; `slots` is a slice when the
    tiles' slots are adjacent and rise by one (no factor is copied then), else their indices (K).
    """

    gather: Tensor | None
    keep: Tensor | None
    scatter: Tensor | None
    slots: slice | Tensor
    tiles: int
    tile: int


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
    a_KHI = a_SMRI[plan.slots].flatten(1, 2)
    b_KRO = b_SRO[plan.slots]
    h_KTH = torch.bmm(x_KTI, a_KHI.transpose(1, 2))
    start = 0
    for i, width in enumerate(widths):
        delta_KTO = torch.bmm(h_KTH[..., i * rank : (i + 1) * rank], b_KRO[..., start : start + width])
        delta = delta_KTO.flatten(0, 1)
        if plan.keep is not None:
            delta = delta.index_select(0, plan.keep)
        target = y_NO[:, start : start + width]
        if plan.scatter is None:
            target += delta
        else:
            target.index_add_(0, plan.scatter, delta)
        start += width


def _tile(counts: Sequence[int]) -> int:
    """Choose the tile that costs least: rows computed, padding included, plus factors read."""
    sizes = [*TILES, max(counts)]

    def cost(size: int) -> int:
        return sum(-(-count // size) for count in counts) * (size + TILE_COST_ROWS)

    return min(sizes, key=cost)
