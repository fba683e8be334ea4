"""Products of rows with the weights of their experts, on CPU: pairs sorted by expert, one grouped product.

A pair is one token at one of its experts. In bfloat16 a row's bits do not depend on the others of its
group (measured for 1 to 256 rows); in float32 the BLAS sums groups of fewer than 4 rows in another order.

Shapes: T tokens, K experts of a token, P = T * K pairs, E experts, D inputs, O outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


@dataclass(frozen=True)
class Groups:
    """Pairs in the order of their experts.

    `order` (P) are pairs sorted by expert, `place` (P) is its inverse, `ends` (E) where each expert's
    pairs end, `experts` (P) the sorted pairs' experts, `each` the pairs of a token (K).
    """

    order: Tensor
    place: Tensor
    ends: Tensor
    experts: Tensor
    each: int

    def product(self, rows: Tensor, weight_EOD: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """Return each pair's row times its expert's weight, (P, O); `rows` is (P, D), or (T, D) for all K.

        The strides of rows and weights must be multiples of 16 bytes.
        """
        source = self.order if len(rows) == len(self.order) else self.order // self.each
        y_PO = grouped_mm(rows.index_select(0, source), weight_EOD.transpose(1, 2), offs=self.ends)
        if bias_EO is not None:
            y_PO += bias_EO[self.experts].to(y_PO.dtype)
        return y_PO.index_select(0, self.place)


def group(experts_TK: Tensor, count: int) -> Groups:
    """Sort a step's pairs by expert; `count` is E."""
    flat = experts_TK.flatten()
    experts, order = flat.sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    ends = torch.bincount(flat, minlength=count).cumsum(0, dtype=torch.int32)
    return Groups(order, place, ends, experts, experts_TK.shape[1])
