"""The routed experts of a layer, frozen, with the factors of whichever adapter is switched on.

Knows transformers' modules of experts (version 5: `gate_up_proj` (E, 2I, H), the rows of up after those of
gate, and `down_proj` (E, H, I)). Chooses no expert: the router is the base's own.

Shapes: T tokens, K experts of a token, P = T*K pairs, E experts, H hidden size, I inner size, D width, O
outputs.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from engine.adapters.families import PROJECTIONS
from engine.errors import BaseModelError
from engine.training.adapter import Adapter
from kernels.experts_grad import lora


@dataclass(frozen=True)
class Groups:
    """Pairs sorted by expert: `order` (P), its inverse `place` (P), and the `ends` (E) of experts."""

    order: Tensor
    place: Tensor
    ends: Tensor

    @staticmethod
    def of(experts_TK: Tensor, count: int) -> "Groups":
        order = experts_TK.flatten().argsort(stable=True)
        ends = torch.bincount(experts_TK.flatten(), minlength=count).cumsum(0, dtype=torch.int32)
        return Groups(order, order.argsort(), ends)


class Product(Function):
    """Each pair's product (P, O) with its expert's frozen weight; the rows alone get a gradient.

    `x` has a row for `each` pairs. On any device the same sums in the same order: no atomic additions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_EOD: Tensor, groups: Groups, each: int) -> Tensor:
        ctx.each = each
        ctx.save_for_backward(weight_EOD, groups.order, groups.place, groups.ends)
        rows_PD = x.index_select(0, groups.order // each)
        y_PO = grouped_mm(rows_PD, weight_EOD.transpose(1, 2), offs=groups.ends)
        return y_PO.index_select(0, groups.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_EOD, order, place, ends = ctx.saved_tensors
        dy_PO = grads[0].index_select(0, order)
        dx_PD = grouped_mm(dy_PO, weight_EOD, offs=ends).index_select(0, place)
        return dx_PD.view(-1, ctx.each, dx_PD.shape[1]).sum(1), None, None, None


class SlottedExperts(nn.Module):
    """A layer's frozen experts that add the factors of whichever adapter is switched on."""

    def __init__(self, base: Any):
        super().__init__()
        self.base = base
        self.factors: dict[str, tuple[Tensor, Tensor, float]] = {}
        name = "kernels.experts_triton" if base.down_proj.is_cuda else "kernels.experts"
        # Triton is imported on a GPU alone.
        self.ops = import_module(name)

    def switch(self, name: str, adapter: Adapter | None) -> None:
        """Switch an adapter on, or the plain base with None; `name` is this module's path."""
        pairs = {part: adapter and adapter.pair(f"{name}.{part}") for part in PROJECTIONS}
        self.factors = {part: pair for part, pair in pairs.items() if pair}

    def forward(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        tokens, count = experts_TK.shape
        groups = Groups.of(experts_TK, len(self.base.down_proj))
        # One adapter for all tokens.
        slots_T = experts_TK.new_zeros(tokens)
        add = partial(self._add, slots_T, experts_TK, self.ops.plan(slots_T, experts_TK))
        both_PI = Product.apply(x_TH, self.base.gate_up_proj, groups, count)
        gate_TKI, up_TKI = both_PI.view(tokens, count, -1).chunk(2, dim=-1)
        gate_TKI = add("gate_proj", gate_TKI, x_TH)
        up_TKI = add("up_proj", up_TKI, x_TH)
        inner_TKI = self.base.act_fn(gate_TKI) * up_TKI
        y_PH = Product.apply(inner_TKI.flatten(0, 1), self.base.down_proj, groups, 1)
        y_TKH = add("down_proj", y_PH.view(tokens, count, -1), inner_TKI)
        return (y_TKH * weights_TK[..., None]).sum(1).to(x_TH.dtype)

    def _add(
        self, slots_T: Tensor, experts_TK: Tensor, plan: Any, projection: str, y_TKO: Tensor, x: Tensor
    ) -> Tensor:
        """Add the adapter's part of one projection; `x` is (T, D) or (T, K, D)."""
        if projection not in self.factors:
            return y_TKO
        a_ERD, b_ERO, scale = self.factors[projection]
        # In the base's dtype, rounded as `Adapter.canonical` rounds them: what the engine serves.
        a_ERD, b_ERO = a_ERD.to(x.dtype), (b_ERO * scale).to(x.dtype)
        b_EOR = b_ERO.transpose(1, 2)
        return y_TKO + lora(x, a_ERD[None], b_EOR[None], slots_T, experts_TK, ops=self.ops, plan=plan)


def slotted_experts(base: Any) -> SlottedExperts:
    """Wrap a layer's experts; `BaseModelError` when their parameters are laid out in another way."""
    if base.has_bias or base.is_transposed or not base.is_concatenated:
        raise BaseModelError(
            f"The trainer cannot train {type(base).__name__}: it has biases, transposed weights, or "
            "alternating rows of gate and up. Set base.name to a base of another family."
        )
    return SlottedExperts(base)
