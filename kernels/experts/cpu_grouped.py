"""LoRA on a mixture of experts, on CPU, for training: torch's grouped product over sorted pairs.

The three operations of `cpu.py`, with the same meaning, for many pairs in a segment. There the products
dominate, and `cpu.py` computes padding and reads factors line by line (docs/benchmarks/experts.md compares
the two). A segment's pairs are one product, so a row's bits may depend on its batch. Use `cpu.py` where they
must not, as in serving.

Shapes: T tokens, L tokens with an adapter, K experts of a token, P pairs, R rank, D width, S slots,
E experts, G = S*E segments.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from kernels.experts import cpu as experts


@dataclass(frozen=True)
class Sorted:
    """Pairs sorted by segment: `order` (P), and the `ends` (S*E) of segments."""

    order: Tensor
    ends: Tensor

    def gather(self, rows: Tensor, each: int) -> Tensor:
        """Return the sorted pairs' rows (P, D); `rows` is (L, D), one for `each` pairs, or (L, K, D)."""
        if rows.dim() == 2:
            return rows.index_select(0, self.order // each)
        return rows.flatten(0, 1).index_select(0, self.order)

    def scatter(self, sorted_PD: Tensor, each: int) -> Tensor:
        """Return the sorted rows (P, D) in pair order, (L, `each`, D)."""
        rows_PD = torch.empty_like(sorted_PD).index_copy_(0, self.order, sorted_PD)
        return rows_PD.view(-1, each, sorted_PD.shape[-1])


@dataclass(frozen=True)
class GroupedRoutingPlan(experts.RoutingPlan):
    """The assignment of tokens to segments, sorted once for all factors of a layer's step."""

    _sorted: dict[tuple[int, int, int], Sorted] = field(default_factory=dict)

    def sorted(self, slots: int, experts: int, each: int) -> Sorted:
        """Return the sorted pairs, `each` for a token, for factors of `slots` slots and `experts` experts."""
        key = (slots, experts, each)
        if key not in self._sorted:
            segment_P = self.segments(experts, each).flatten()
            ends = torch.bincount(segment_P, minlength=slots * experts).cumsum(0, dtype=torch.int32)
            self._sorted[key] = Sorted(segment_P.argsort(stable=True), ends)
        return self._sorted[key]


def plan(slots_T: Tensor, experts_TK: Tensor) -> GroupedRoutingPlan | None:
    """Return the plan of the tokens with an adapter (slot >= 0); None when no token has one."""
    routing = experts.plan(slots_T, experts_TK)
    return GroupedRoutingPlan(routing.tokens, routing.slots, routing.experts) if routing else None


def shrink(x: Tensor, factor_SERD: Tensor, plan: GroupedRoutingPlan) -> Tensor:
    """Return h (L, K, R), the product of each pair's row with its segment's factor; see `cpu.shrink`."""
    count = plan.experts.shape[1]
    slots, number = factor_SERD.shape[:2]
    # With a shared factor and one row, all experts of a token have the same result.
    each = 1 if x.dim() == 2 and number == 1 else count
    pairs = plan.sorted(slots, number, each)
    rows_PD, factor_GRD = _aligned(pairs.gather(plan.rows(x), each)), _aligned(factor_SERD.flatten(0, 1))
    h_PR = grouped_mm(rows_PD, factor_GRD.transpose(1, 2), offs=pairs.ends)
    return pairs.scatter(h_PR, each).expand(-1, count, -1)


def expand(y: Tensor, h_LKR: Tensor, factor_SERD: Tensor, plan: GroupedRoutingPlan) -> None:
    """Add each pair's h times its segment's factor to `y` in place, without weights; see `cpu.expand`."""
    slots, number = factor_SERD.shape[:2]
    if y.dim() == 2 and number == 1:
        h_LKR = h_LKR.sum(1, keepdim=True)
    each = h_LKR.shape[1]
    pairs = plan.sorted(slots, number, each)
    h_PR, factor_GRD = _aligned(pairs.gather(h_LKR, each)), _aligned(factor_SERD.flatten(0, 1), ranks=True)
    delta_PD = grouped_mm(h_PR, factor_GRD, offs=pairs.ends)[:, : factor_SERD.shape[-1]]
    delta = pairs.scatter(delta_PD, each)
    plan.add(y, delta.sum(1) if y.dim() == 2 else delta)


def outer(h_LKR: Tensor, x: Tensor, experts: int, slots: int, plan: GroupedRoutingPlan) -> Tensor:
    """Return the gradient of a factor (S, E, R, D): each segment's sum of h (L, K, R) times row."""
    if x.dim() == 2 and experts == 1:
        h_LKR = h_LKR.sum(1, keepdim=True)
    each, rank = h_LKR.shape[1:]
    pairs = plan.sorted(slots, experts, each)
    h_PR, x_PD = _aligned(pairs.gather(h_LKR, each)), _aligned(pairs.gather(plan.rows(x), each))
    sums_GRD = grouped_mm(h_PR.T, x_PD, offs=pairs.ends)[:, :rank, : x.shape[-1]]
    return sums_GRD.reshape(slots, experts, rank, -1)


def _aligned(values: Tensor, ranks: bool = False) -> Tensor:
    """Zero-pad the last axis, with `ranks` the one before too, to the 16 bytes that `grouped_mm` needs."""
    whole = 16 // values.element_size()
    missing = [-size % whole for size in (values.shape[-1], values.shape[-2] if ranks else 0)]
    return pad(values, (0, missing[0], 0, missing[1])) if any(missing) else values
