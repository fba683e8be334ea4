"""Products of rows with their experts' weights: pairs sorted by expert, then one grouped product.

A pair is one token at one of its experts. On a CPU a row's bits do not depend on its batch: the BLAS uses one
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
    of each expert's rows. `experts` (P): each pair's expert.
    """

    gather: Tensor
    place: Tensor
    ends: Tensor
    experts: Tensor

    def product(self, rows: Tensor, weight_EOD: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """Return each pair's row times its expert's weight plus bias, (P, O).

        `rows` is (P, D), or (T, D) with one row for all K experts of a token. Rows and weights have one
        dtype; their strides must be multiples of 16 bytes.
        """
        source = self.gather // (len(self.place) // len(rows))
        y_NO = grouped_mm(rows.index_select(0, source), weight_EOD.transpose(1, 2), offs=self.ends)
        y_PO = y_NO.index_select(0, self.place)
        if bias_EO is not None:
            y_PO += bias_EO[self.experts].to(y_PO.dtype)
        return y_PO


def group(experts_TK: Tensor, count: int) -> ExpertGroups:
    """Sort pairs by expert, of `count` experts; on a CPU groups are padded, as the BLAS needs it."""
    experts_P = experts_N = experts_TK.flatten()
    rows_E = torch.bincount(experts_P, minlength=count)
    if not experts_P.is_cuda:
        missing_E = (LEAST_ROWS - rows_E).clamp(min=0).where(rows_E > 0, 0)
        experts_N = torch.cat([experts_P, torch.arange(count).repeat_interleave(missing_E)])
        rows_E += missing_E
    order = experts_N.argsort(stable=True)
    position = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).index_copy_(0, order, position)[: len(experts_P)]
    # Padding is numbered after all pairs; its rows repeat the last pair.
    gather = order.clamp(max=len(experts_P) - 1)
    return ExpertGroups(gather, place, rows_E.cumsum(0, dtype=torch.int32), experts_P)
