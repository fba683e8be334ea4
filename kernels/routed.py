"""Products of rows with their experts' weights on CPU: pairs sorted by expert, then one grouped product.

A pair is one token at one of its experts. A row's bits do not depend on its batch: the BLAS uses one
summation order from four rows on and another for fewer, so each group is padded to at least four rows.

Shapes: T tokens, K experts of a token, P = T * K pairs, N rows with padding, E experts, D inputs, O outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

LEAST_ROWS = 4


@dataclass(frozen=True)
class ExpertGroups:
    """Pairs sorted by expert.

    `gather` (N): the pair of each row (any, for padding). `place` (P): each pair's row. `ends` (E): the end
    of each expert's rows. `experts` (P): each pair's expert. `each`: the pairs of a token (K).
    """

    gather: Tensor
    place: Tensor
    ends: Tensor
    experts: Tensor
    each: int

    def product(self, rows: Tensor, weight_EOD: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """Return each pair's row times its expert's weight plus bias, (P, O).

        `rows` is (P, D), or (T, D) with one row for all K experts of a token. Rows and weights have one
        dtype; their strides must be multiples of 16 bytes.
        """
        source = self.gather if len(rows) == len(self.place) else self.gather // self.each
        y_NO = grouped_mm(rows.index_select(0, source), weight_EOD.transpose(1, 2), offs=self.ends)
        y_PO = y_NO.index_select(0, self.place)
        if bias_EO is not None:
            y_PO += bias_EO[self.experts].to(y_PO.dtype)
        return y_PO


def group(experts_TK: Tensor, count: int) -> ExpertGroups:
    """Sort a step's pairs by expert, of `count` experts."""
    experts = experts_TK.flatten()
    counts = torch.bincount(experts, minlength=count)
    rows = torch.where(counts > 0, counts.clamp(min=LEAST_ROWS), 0)
    ends = rows.cumsum(0)
    order = experts.argsort(stable=True)
    # A sorted pair's rank within its expert, plus the rows of the experts before it.
    shift = (ends - rows) - (counts.cumsum(0) - counts)
    position = torch.arange(len(order)) + shift[experts[order]]
    place = torch.empty_like(order).index_copy_(0, order, position)
    gather = order.new_zeros(int(ends[-1])).index_copy_(0, position, order)
    return ExpertGroups(gather, place, ends.int(), experts, experts_TK.shape[1])
