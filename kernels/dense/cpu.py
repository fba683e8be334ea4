"""LoRA for rows of many adapters on CPU: grouped by slot, batched products with A, embedding bags with B.

Rows are sorted by slot and cut into tiles of one slot each, so A is read once for each tile and not for each
row. For B, each row takes a weighted sum of its slot's lines, which copies no factor. Rows without an adapter
are in no tile: their output is unchanged, bit for bit. A row's bits do not depend on its batch: for widths of
64 to 1,024, ranks of 3 to 48 and tiles of 4 to 300 rows on AVX-512, one row's products were bit-identical in
float32 and in bfloat16 (on Intel CPUs only with MKL_CBWR=AUTO,STRICT).

Shapes: N rows, L rows with an adapter, K tiles, T rows a tile, I input features, O output features,
R rank, S slots, M slices of a fused module, C chunks of O, each as wide as all slices' common divisor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

# The BLAS may use one summation order from four rows on and another for fewer. With smaller tiles, a row's
# last digits would depend on its batch.
TILES = (4, 8, 16, 32, 64, 128, 256)
# Reading a slot's factors for one more tile costs about as much as computing this many rows.
TILE_COST_ROWS = 4


@dataclass(frozen=True)
class TilePlan:
    """The assignment of rows to tiles; made once for each step and used by every layer.

    `gather`: the rows of tiles (K*T), padded by repeating a row, or one row for each tile (K) when no slot
    has more (`single`); None means every row once, in order. `place` (L): the positions of rows with an
    adapter in `gather`; None means all, in order. `rows` (L): these rows; None means every row. `row_slots`
    (L): their slots. `slots` (K): the tiles' slots, a slice when they are consecutive (then no factor is
    copied).
    """

    gather: Tensor | None
    single: bool
    place: Tensor | None
    rows: Tensor | None
    slots: slice | Tensor
    tiles: int
    tile: int
    row_slots: Tensor
    _lines: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _spread: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def fill(self, x: Tensor) -> Tensor:
        """Return the rows (N, ...) as tiles (K, T, ...)."""
        x = x if self.gather is None else x.index_select(0, self.gather)
        if self.single:
            return x[:, None].expand(-1, self.tile, *x.shape[1:])
        return x.reshape(self.tiles, self.tile, *x.shape[1:])

    def drain(self, tiled: Tensor) -> Tensor:
        """Return the rows with an adapter (L, ...) from tiles (K, T, ...), in row order."""
        rows = tiled[:, 0] if self.single else tiled.flatten(0, 1)
        return rows if self.place is None else rows.index_select(0, self.place)

    def add(self, y: Tensor, delta: Tensor) -> None:
        """Add `delta` (L, ...) to the rows of `y` (N, ...) with an adapter, in place."""
        if self.rows is None:
            y += delta
        else:
            y.index_add_(0, self.rows, delta)

    def lines(self, rank: int, chunks: int) -> Tensor:
        """Return the line numbers (L * C, R) in a table (S * R * C) that make each row's chunks."""
        if (rank, chunks) not in self._lines:
            first_LR = self.row_slots[:, None] * rank + torch.arange(rank)
            lines_LCR = first_LR[:, None] * chunks + torch.arange(chunks)[:, None]
            self._lines[rank, chunks] = lines_LCR.flatten(0, 1)
        return self._lines[rank, chunks]

    def spread(self, widths: Sequence[int], chunk: int) -> Tensor:
        """Return the slice number of each chunk of the outputs (C)."""
        if (key := tuple(widths)) not in self._spread:
            each = torch.tensor(widths) // chunk
            self._spread[key] = torch.arange(len(widths)).repeat_interleave(each)
        return self._spread[key]


def plan(slots: Sequence[int]) -> TilePlan | None:
    """Group rows by slot; `slots[row]` < 0 means no adapter. Returns None when no row has one."""
    groups: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot >= 0:
            groups.setdefault(slot, []).append(row)
    if not groups:
        return None
    order = sorted(groups)
    tile = _tile([len(groups[slot]) for slot in order])
    single = all(len(groups[slot]) == 1 for slot in order)
    gather: list[int] = []
    position: dict[int, int] = {}
    tile_slots: list[int] = []
    for slot in order:
        rows = groups[slot]
        for start in range(0, len(rows), tile):
            part = rows[start : start + tile]
            position.update(zip(part, range(len(gather), len(gather) + len(part)), strict=True))
            gather.extend(part if single else part + part[:1] * (tile - len(part)))
            tile_slots.append(slot)
    with_adapter = sorted(position)
    place = [position[row] for row in with_adapter]
    adjacent = tile_slots == list(range(tile_slots[0], tile_slots[0] + len(tile_slots)))
    return TilePlan(
        gather=None if gather == list(range(len(slots))) else torch.tensor(gather),
        single=single,
        place=None if place == list(range(len(gather))) else torch.tensor(place),
        rows=None if len(with_adapter) == len(slots) else torch.tensor(with_adapter),
        slots=slice(tile_slots[0], tile_slots[-1] + 1) if adjacent else torch.tensor(tile_slots),
        tiles=len(tile_slots),
        tile=tile,
        row_slots=torch.tensor([slots[row] for row in with_adapter]),
    )


def add_lora(
    y_NO: Tensor, x_NI: Tensor, a_SMRI: Tensor, b_SRO: Tensor, widths: Sequence[int], plan: TilePlan
) -> None:
    """Add every row's LoRA product to `y` in place.

    `a_SMRI` (S, M, R, I) holds the A factors of the module's slices, `b_SRO` (S, R, O) their B factors side
    by side, `widths` the slices' widths in O. All have one floating dtype. Equals `reference.add_lora` for
    each slice up to summation order.
    """
    rank = a_SMRI.shape[2]
    h_KTX = torch.bmm(plan.fill(x_NI), a_SMRI[plan.slots].flatten(1, 2).transpose(1, 2))
    h_LX = plan.drain(h_KTX)
    chunk = math.gcd(*widths)
    if chunk * len(widths) < sum(widths):
        h_LX = h_LX.unflatten(1, (-1, rank)).index_select(1, plan.spread(widths, chunk))
    delta_LO = embedding_bag(
        plan.lines(rank, b_SRO.shape[2] // chunk),
        b_SRO.view(-1, chunk),
        per_sample_weights=h_LX.reshape(-1, rank),
        mode="sum",
    ).view(len(plan.row_slots), -1)
    plan.add(y_NO, delta_LO)


def _tile(counts: Sequence[int]) -> int:
    """Choose the cheapest tile size: computed rows, padding included, plus factor reads."""
    sizes = [*TILES, max(*TILES[:1], *counts)]

    def cost(size: int) -> int:
        return sum(-(-count // size) for count in counts) * (size + TILE_COST_ROWS)

    return min(sizes, key=cost)
