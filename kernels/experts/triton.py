"""LoRA on a mixture of experts as Triton kernels: the three operations of `cpu.py` for a GPU.

Pairs are sorted by (adapter, expert) segment on the device, without a synchronisation, and cut into
tiles of one segment; a program computes one tile. No sum crosses programs and no atomic is used:
results are deterministic, and a row's bits do not depend on its batch. An `expand` that sums over a
token's experts writes the pairs first and adds them in the order of k.

Unlike in `cpu.py`, h has a row for every token, zero for tokens without an adapter.

Shapes: T tokens, K experts of a token, P = T*K pairs, R rank, D width, S slots, E experts (1:
shared), G = S*E segments, N tiles, M pairs in a tile.
"""
# Triton interprets kernel annotations itself, so kernels have none for mypy.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
BLOCK = 64
MAX_RANK = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_reason(x: Tensor, factor_SERD: Tensor) -> str | None:
    """Return why these kernels cannot compute a call, or None."""
    if x.dtype != factor_SERD.dtype or x.dtype not in DTYPES:
        return f"rows are {x.dtype} and the factor {factor_SERD.dtype}: both need one dtype of {DTYPES}."
    if x.device != factor_SERD.device:
        return f"rows are on {x.device} and the factor on {factor_SERD.device}; move one of them."
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"tensors are on {x.device}: use a CUDA device, or set TRITON_INTERPRET=1 before import."
    if factor_SERD.shape[2] > MAX_RANK:
        return f"rank {factor_SERD.shape[2]} is over {MAX_RANK}, the limit of a program's registers."
    return None


@dataclass(frozen=True)
class SegmentTiles:
    """Pairs `order` (P) sorted by segment; `starts` (G+1), each segment's first pair; tiles of `TILE` pairs.

    `tile_segment` (N) is G for a tile beyond the last, `tile_first` (N) its first sorted pair.
    """

    order: Tensor
    starts: Tensor
    tile_segment: Tensor
    tile_first: Tensor


@dataclass(frozen=True)
class TritonRoutingPlan:
    """The assignment of tokens to segments; made once for a layer's step, for all its factors."""

    slots: Tensor
    experts: Tensor
    _segments: dict[tuple[int, int], SegmentTiles] = field(default_factory=dict)

    def segments(self, adapters: int, experts: int) -> SegmentTiles:
        """Return the sorted pairs for factors of `adapters` slots and `experts` experts."""
        key = (adapters, experts)
        if key not in self._segments:
            slots_TK = self.slots[:, None].expand_as(self.experts)
            segment_TK = slots_TK * experts + self.experts if experts > 1 else slots_TK
            none = adapters * experts
            self._segments[key] = sort_pairs(torch.where(slots_TK >= 0, segment_TK, none).flatten(), none)
        return self._segments[key]


def plan(slots_T: Tensor, experts_TK: Tensor) -> TritonRoutingPlan:
    """Return the plan of the tokens' adapters (slot < 0: none) and experts; pairs are sorted on first use."""
    return TritonRoutingPlan(slots_T.long(), experts_TK.long())


def sort_pairs(segment_P: Tensor, segments: int) -> SegmentTiles:
    """Sort pairs by segment; pairs of segment number `segments` have no adapter and come last."""
    counts = segment_P.new_zeros(segments + 1).scatter_add_(0, segment_P, torch.ones_like(segment_P))
    starts = counts.cumsum(0) - counts
    tiles = (counts[:segments] + TILE - 1) // TILE
    ends = tiles.cumsum(0)
    pairs = len(segment_P)
    # The maximum number of tiles: the true number is known on the device only.
    most = torch.arange(min(pairs, pairs // TILE + segments), device=segment_P.device)
    segment_N = torch.searchsorted(ends, most, right=True)
    known = segment_N.clamp_max(segments - 1)
    first_N = starts[known] + (most - (ends - tiles)[known]) * TILE
    return SegmentTiles(segment_P.argsort(stable=True), starts, segment_N, first_N)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    # Triton's interpreter (3.9) multiplies bfloat16 as integers.
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def shrink_kernel(
    x, w, h, order, starts, tile_segment, tile_first, segments, E, R, D, each,
    x_row, w_s, w_e, w_r, w_d,
    M: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    segment = tl.load(tile_segment + tile)
    if segment >= segments:
        return
    position = tl.load(tile_first + tile) + tl.arange(0, M)
    live = position < tl.load(starts + segment + 1)
    pair = tl.load(order + position, mask=live, other=0)
    rank = tl.arange(0, RANK)
    factor = w + (segment // E) * w_s + (segment % E) * w_e
    total = tl.zeros((M, RANK), dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        rows = tl.load(
            x + (pair // each)[:, None] * x_row + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        lines = tl.load(
            factor + rank[None, :] * w_r + d[:, None] * w_d,
            mask=(rank < R)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        total += _dot(rows, lines, UPCAST)
    at = h + pair[:, None] * R + rank[None, :]
    tl.store(at, total.to(h.dtype.element_ty), mask=live[:, None] & (rank < R)[None, :])


@triton.jit
def expand_kernel(
    y, h, w, order, starts, tile_segment, tile_first, segments, E, R, D,
    y_row, w_s, w_e, w_r, w_d,
    ADD: tl.constexpr, M: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    segment = tl.load(tile_segment + tile)
    if segment >= segments:
        return
    position = tl.load(tile_first + tile) + tl.arange(0, M)
    live = position < tl.load(starts + segment + 1)
    pair = tl.load(order + position, mask=live, other=0)
    rank = tl.arange(0, RANK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        h + pair[:, None] * R + rank[None, :], mask=live[:, None] & (rank < R)[None, :], other=0.0
    )
    lines = tl.load(
        w + (segment // E) * w_s + (segment % E) * w_e + rank[:, None] * w_r + d[None, :] * w_d,
        mask=(rank < R)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    delta = _dot(values, lines, UPCAST)
    at = y + pair[:, None] * y_row + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    if ADD:
        delta += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, delta.to(y.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(y, pairs, slots, K, D, y_row, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    if tl.load(slots + token) < 0:
        return
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(K):
        total += tl.load(pairs + (token.to(tl.int64) * K + k) * D + d, mask=d < D, other=0.0)
    at = y + token.to(tl.int64) * y_row + d
    total += tl.load(at, mask=d < D, other=0.0).to(tl.float32)
    tl.store(at, total.to(y.dtype.element_ty), mask=d < D)


@triton.jit
def outer_kernel(
    h, x, grad, order, starts, R, D, each, x_row,
    M: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(starts + segment + 1)
    total = tl.zeros((RANK, BLOCK), dtype=tl.float32)
    for first in range(tl.load(starts + segment), end, M):
        position = first + tl.arange(0, M)
        live = position < end
        pair = tl.load(order + position, mask=live, other=0)
        values = tl.load(
            h + pair[None, :] * R + rank[:, None], mask=live[None, :] & (rank < R)[:, None], other=0.0
        )
        rows = tl.load(
            x + (pair // each)[:, None] * x_row + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        total += _dot(values, rows, UPCAST)
    at = grad + (segment * R + rank[:, None]) * D + d[None, :]
    tl.store(at, total.to(grad.dtype.element_ty), mask=(rank < R)[:, None] & (d < D)[None, :])


def _rank_block(rank: int) -> int:
    """Return the power of two that covers a rank; `tl.dot` needs at least 16."""
    return max(16, triton.next_power_of_2(rank))


def _rows(values: Tensor) -> Tensor:
    """Return rows (rows, D) whose elements are contiguous."""
    flat = values.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _check(x: Tensor, factor_SERD: Tensor) -> None:
    reason = unsupported_reason(x, factor_SERD)
    if reason is not None:
        raise ValueError(f"The Triton LoRA kernels cannot compute this: {reason}")


def shrink(x: Tensor, factor_SERD: Tensor, plan: TritonRoutingPlan) -> Tensor:
    """Return h (T, K, R), zero for tokens without an adapter; see `cpu.shrink`.

    Raises `ValueError` with `unsupported_reason`."""
    _check(x, factor_SERD)
    tokens, count = plan.experts.shape
    adapters, experts, rank, width = factor_SERD.shape
    h_TKR = x.new_zeros(tokens, count, rank)
    at, rows = plan.segments(adapters, experts), _rows(x)
    if len(at.tile_segment):
        shrink_kernel[(len(at.tile_segment),)](
            rows, factor_SERD, h_TKR, at.order, at.starts, at.tile_segment, at.tile_first,
            adapters * experts, experts, rank, width, count if x.dim() == 2 else 1,
            rows.stride(0), *factor_SERD.stride(),
            M=TILE, RANK=_rank_block(rank), BLOCK=BLOCK, UPCAST=triton.knobs.runtime.interpret,
        )  # fmt: skip
    return h_TKR


def expand(y: Tensor, h_TKR: Tensor, factor_SERD: Tensor, plan: TritonRoutingPlan) -> None:
    """Add each pair's h times its segment's factor to `y` in place, without weights; see `cpu.expand`.

    Rows of `y` (T, D) or (T, K, D) may be strided; elements of a row must be contiguous. Raises `ValueError`
    with `unsupported_reason`.
    """
    _check(y, factor_SERD)
    assert y.stride(-1) == 1
    assert y.dim() == 2 or y.stride(0) == y.shape[1] * y.stride(1)
    adapters, experts, rank, width = factor_SERD.shape
    at, summed = plan.segments(adapters, experts), y.dim() == 2
    if not len(at.tile_segment):
        return
    pairs = y.new_empty(plan.experts.numel(), width, dtype=torch.float32) if summed else y
    blocks = triton.cdiv(width, BLOCK)
    expand_kernel[(len(at.tile_segment), blocks)](
        pairs, h_TKR.contiguous(), factor_SERD, at.order, at.starts, at.tile_segment, at.tile_first,
        adapters * experts, experts, rank, width, pairs.stride(-2), *factor_SERD.stride(),
        ADD=not summed, M=TILE, RANK=_rank_block(rank), BLOCK=BLOCK, UPCAST=triton.knobs.runtime.interpret,
    )  # fmt: skip
    if summed:
        combine_kernel[(len(y), blocks)](
            y, pairs, plan.slots, plan.experts.shape[1], width, y.stride(0), BLOCK=BLOCK
        )


def outer(h_TKR: Tensor, x: Tensor, experts: int, slots: int, plan: TritonRoutingPlan) -> Tensor:
    """Return the gradient of a factor (S, E, R, D): each segment's sum of h (T, K, R) times row."""
    rank, width = h_TKR.shape[-1], x.shape[-1]
    grad_SERD = x.new_empty(slots, experts, rank, width)
    at, rows = plan.segments(slots, experts), _rows(x)
    outer_kernel[(slots * experts, triton.cdiv(width, BLOCK))](
        h_TKR.contiguous(), rows, grad_SERD, at.order, at.starts, rank, width,
        plan.experts.shape[1] if x.dim() == 2 else 1, rows.stride(0),
        M=TILE, RANK=_rank_block(rank), BLOCK=BLOCK, UPCAST=triton.knobs.runtime.interpret,
    )  # fmt: skip
    return grad_SERD
