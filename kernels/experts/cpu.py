"""LoRA on a mixture of experts, on CPU: the pairs of each (adapter, expert) segment in batched products.

A pair is one token at one of its experts. Tokens without an adapter (slot < 0) are in no plan: they
are not read, and their output is unchanged, bit for bit. Nothing here loops over experts, adapters
or tokens. Three operations serve forward and backward: `shrink` (rows to rank), `expand` (rank to
rows) and `outer` (a factor's gradient).

Factors are (S, E, R, D), rank before width: A as it is, B transposed (`b.transpose(-1, -2)`). A
factor with E = 1 is shared by all experts. B is read in place when its memory is rank-major, as in the
slot buffers; otherwise each call copies it.

A row's bits do not depend on its batch. `expand` sums each row in a fixed order. `shrink` takes a product for
each pair, or tiles of a segment's pairs where that is cheaper. The BLAS uses one summation order from four
rows on and another for fewer, so each product has at least four rows, and both ways give the same bits
(measured in float32 and bfloat16).

Shapes: T tokens, L tokens with an adapter, K experts of a token, P pairs, R rank, D width, S slots,
E experts, N tiles, M pairs in a tile, G segments in use.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

TILES = (1, 4, 16, 64)
# Reading a segment's factor for one more tile costs about as much as computing this many pairs.
TILE_COST_PAIRS = 4
# Copying a factor for each pair costs no more than sorting, up to so many elements: decode.
COPIED_WITHOUT_TILES = 2**21


@dataclass(frozen=True)
class Tiles:
    """Pairs sorted by segment and cut into tiles of one segment each, the last one padded.

    `order` (P): the pairs in that order. `place` (P): their positions among the N*M of all tiles. `segment`
    (N): each tile's segment. `present` (G): the segments in use. `first` (G): their first tiles.
    """

    order: Tensor
    place: Tensor
    segment: Tensor
    present: Tensor
    first: Tensor
    size: int

    def fill(self, rows_PD: Tensor) -> Tensor:
        """Return the rows (P, D) as tiles (N, M, D); padding is zero."""
        tiled = rows_PD.new_zeros(len(self.segment) * self.size, rows_PD.shape[-1])
        tiled[self.place] = rows_PD[self.order]
        return tiled.view(len(self.segment), self.size, -1)

    def drain(self, tiled_NMD: Tensor) -> Tensor:
        """Return the rows of tiles (N, M, D) as (P, D), in pair order."""
        rows_PD = tiled_NMD.new_empty(len(self.order), tiled_NMD.shape[-1])
        rows_PD[self.order] = tiled_NMD.flatten(0, 1)[self.place]
        return rows_PD


def cut(segment_P: Tensor, size: int) -> Tiles:
    """Sort pairs by segment and cut them into tiles of `size`."""
    order = segment_P.argsort(stable=True)
    present, counts = torch.unique_consecutive(segment_P[order], return_counts=True)
    tiles = (counts + size - 1) // size
    first = tiles.cumsum(0) - tiles
    # A sorted pair's position within its segment, after the places of the tiles before it.
    within = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = first.repeat_interleave(counts) * size + within
    return Tiles(order, place, present.repeat_interleave(tiles), present, first, size)


def cheapest(segment_P: Tensor) -> int:
    """Choose the cheapest tile size: computed pairs, padding included, plus factor reads."""
    counts = torch.bincount(segment_P)
    sizes = torch.tensor(TILES)
    tiles = (counts[counts > 0][:, None] + sizes - 1) // sizes
    return TILES[int((tiles.sum(0) * (sizes + TILE_COST_PAIRS)).argmin())]


@dataclass(frozen=True)
class RoutingPlan:
    """The assignment of tokens to segments; made once for a layer's step, for all its factors.

    `tokens` (L): the tokens with an adapter (None: every token). `slots` (L): their adapters. `experts`
    (L, K): their experts.
    """

    tokens: Tensor | None
    slots: Tensor
    experts: Tensor
    _sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    _tiles: dict[tuple[int, int, int], Tiles] = field(default_factory=dict)

    def rows(self, values: Tensor) -> Tensor:
        """Return the rows (L, ...) of tokens with an adapter."""
        return values if self.tokens is None else values.index_select(0, self.tokens)

    def add(self, y: Tensor, delta: Tensor) -> None:
        """Add `delta` (L, ...) to the rows of tokens with an adapter, in place."""
        if self.tokens is None:
            y += delta
        else:
            y[self.tokens] += delta

    def segments(self, experts: int, each: int) -> Tensor:
        """Return the segment of each pair (L, `each`) in a factor of `experts` experts."""
        if experts == 1:
            return self.slots[:, None].expand(-1, each)
        return self.slots[:, None] * experts + self.experts

    def size(self, experts: int, each: int, elements: int) -> int:
        """Return the cheapest tile size for the pairs of `segments`, with factors of `elements` elements."""
        if len(self.slots) * each * elements <= COPIED_WITHOUT_TILES:
            return 1
        key = (experts, each)
        if key not in self._sizes:
            self._sizes[key] = cheapest(self.segments(*key).flatten())
        return self._sizes[key]

    def tiles(self, experts: int, each: int, size: int) -> Tiles:
        """Return the pairs of `segments` in tiles of `size`."""
        key = (experts, each, size)
        if key not in self._tiles:
            self._tiles[key] = cut(self.segments(experts, each).flatten(), size)
        return self._tiles[key]


def plan(slots_T: Tensor, experts_TK: Tensor) -> RoutingPlan | None:
    """Return the plan of the tokens with an adapter (slot >= 0); None when no token has one."""
    has = slots_T >= 0
    if bool(has.all()):
        return RoutingPlan(None, slots_T.long(), experts_TK.long()) if len(slots_T) else None
    tokens = has.nonzero()[:, 0]
    return RoutingPlan(tokens, slots_T[tokens].long(), experts_TK[tokens].long()) if len(tokens) else None


def shrink(x: Tensor, factor_SERD: Tensor, plan: RoutingPlan) -> Tensor:
    """Return h (L, K, R), the product of each pair's row with its segment's factor.

    `x` is (T, D), one row for all experts of a token, or (T, K, D).
    """
    count = plan.experts.shape[1]
    x_L = plan.rows(x)
    # With a shared factor and one row, all experts of a token have the same result.
    each = 1 if x.dim() == 2 and factor_SERD.shape[1] == 1 else count
    key = (factor_SERD.shape[1], each)
    size = plan.size(*key, factor_SERD[0, 0].numel())
    if size == 1:
        h_LKR = _shrink_pairs(x_L, factor_SERD, plan.segments(*key))
    else:
        tiles = plan.tiles(*key, size)
        x_NMD = tiles.fill(_each(x_L, each))
        factor_NRD = factor_SERD.flatten(0, 1).index_select(0, tiles.segment)
        h_LKR = tiles.drain(torch.bmm(x_NMD, factor_NRD.transpose(1, 2))).view(len(x_L), each, -1)
    return h_LKR.expand(-1, count, -1)


def expand(
    y: Tensor, h_LKR: Tensor, factor_SERD: Tensor, plan: RoutingPlan, weights_TK: Tensor | None = None
) -> None:
    """Add each pair's h (L, K, R) times its segment's factor, times its weight, to `y` in place.

    `y` is (T, K, D), one row for each pair, or (T, D), the sum over a token's experts. Without weights the
    weight is 1.
    """
    if weights_TK is not None:
        h_LKR = h_LKR * plan.rows(weights_TK)[..., None]
    if y.dim() == 2 and factor_SERD.shape[1] == 1:
        h_LKR = h_LKR.sum(1, keepdim=True)
    tokens, each, rank = h_LKR.shape
    segments = plan.segments(factor_SERD.shape[1], each)
    lines = segments[..., None] * rank + torch.arange(rank)
    lines = lines.flatten(1) if y.dim() == 2 else lines.flatten(0, 1)
    # An embedding bag is a weighted sum of the table's lines and copies no factor.
    delta = embedding_bag(
        lines,
        factor_SERD.reshape(-1, factor_SERD.shape[-1]),
        per_sample_weights=h_LKR.to(factor_SERD.dtype).reshape(lines.shape),
        mode="sum",
    ).view(tokens, *y.shape[1:])
    plan.add(y, delta)


def outer(h_LKR: Tensor, x: Tensor, experts: int, slots: int, plan: RoutingPlan) -> Tensor:
    """Return the gradient of a factor (S, E, R, D): each segment's sum of h (L, K, R) times row."""
    if x.dim() == 2 and experts == 1:
        h_LKR = h_LKR.sum(1, keepdim=True)
    each, rank = h_LKR.shape[1:]
    tiles = plan.tiles(experts, each, plan.size(experts, each, rank * x.shape[-1]))
    h_NMR = tiles.fill(h_LKR.flatten(0, 1))
    x_NMD = tiles.fill(_each(plan.rows(x), each))
    sums_NRD = torch.bmm(h_NMR.transpose(1, 2), x_NMD)
    grad_SERD = x.new_zeros(slots, experts, rank, x.shape[-1])
    # A segment's tiles are adjacent: one bag for each segment, summed in order.
    bags = embedding_bag(torch.arange(len(sums_NRD)), sums_NRD.flatten(1), tiles.first, mode="sum")
    grad_SERD.view(slots * experts, -1)[tiles.present] = bags
    return grad_SERD


def _each(x_L: Tensor, each: int) -> Tensor:
    """Return one row for each pair (P, D)."""
    return x_L.repeat_interleave(each, 0) if x_L.dim() == 2 else x_L.flatten(0, 1)


def _shrink_pairs(x_L: Tensor, factor_SERD: Tensor, segments_LK: Tensor) -> Tensor:
    """Return h (L, K, R) by one product for each token, or for each pair when pairs have their own rows."""
    tokens, each = segments_LK.shape
    batch = tokens if x_L.dim() == 2 else tokens * each
    factor = factor_SERD.flatten(0, 1).index_select(0, segments_LK.flatten())
    rows = x_L.reshape(batch, 1, -1).expand(-1, TILES[1], -1)
    h = torch.bmm(rows, factor.view(batch, -1, rows.shape[-1]).transpose(1, 2))
    return h[:, 0].reshape(tokens, each, -1)
