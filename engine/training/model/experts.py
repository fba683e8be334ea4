"""The frozen routed experts of a layer plus the factors of the active adapters.

It wraps transformers' expert modules (version 5: `gate_up_proj` (E, 2I, H) with the rows of up after those of
gate, and `down_proj` (E, H, I)). The base's own router chooses the experts.

Shapes: T tokens, K experts of a token, P = T*K pairs, N rows of pairs and padding, E experts, H hidden size,
I inner size, D width, O outputs, S slots, R rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from engine.base.families import PROJECTIONS
from engine.errors import BaseModelError
from engine.training.model.adapter import Part
from engine.training.model.linear import served
from kernels.experts.autograd import lora
from kernels.routed import ExpertGroups, group


class ExpertMatmul(Function):
    """Each pair's product (P, O) with its expert's frozen weight; only the rows get a gradient.

    `x` has a row for each pair, or for all pairs of a token. Deterministic on every device: no atomic
    additions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_EOD: Tensor, groups: ExpertGroups) -> Tensor:
        """Return y (P, O) of x (P, D) or (T, D) and weight (E, O, D)."""
        ctx.rows = len(x)
        ctx.save_for_backward(weight_EOD, groups.gather, groups.place, groups.ends)
        return groups.product(x, weight_EOD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        weight_EOD, gather, place, ends = ctx.saved_tensors
        dy_NO = grads[0].index_select(0, gather)
        dx_PD = grouped_mm(dy_NO, weight_EOD, offs=ends).index_select(0, place)
        return dx_PD.view(ctx.rows, -1, dx_PD.shape[1]).sum(1), None, None


class SlottedExperts(nn.Module):
    """A layer's frozen experts that add the products of the active adapters."""

    def __init__(self, base: Any):
        super().__init__()
        self.base = base
        self.parts: Sequence[Part] = ()
        self.pairs: dict[str, dict[int, tuple[Tensor, Tensor, float]]] = {}
        name = "kernels.experts.triton" if base.down_proj.is_cuda else "kernels.experts.cpu_grouped"
        # Triton is imported on a GPU only.
        self.ops = import_module(name)

    def switch(self, name: str, parts: Sequence[Part]) -> None:
        """Activate the adapters of `parts`; `name` is this module's path."""
        self.parts = parts
        self.pairs = {
            projection: {
                number: pair
                for number, part in enumerate(parts)
                if (pair := part.adapter.pair(f"{name}.{projection}"))
            }
            for projection in PROJECTIONS
        }

    def forward(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum (T, H) over each token's experts (T, K) with weights (T, K)."""
        tokens, count = experts_TK.shape
        groups = group(experts_TK, len(self.base.down_proj))
        slots = Slots(self.parts, experts_TK, self.ops)
        both_PI = ExpertMatmul.apply(x_TH, self.base.gate_up_proj, groups)
        gate_TKI, up_TKI = both_PI.view(tokens, count, -1).chunk(2, dim=-1)
        gate_TKI = slots.add(gate_TKI, x_TH, self.pairs.get("gate_proj", {}))
        up_TKI = slots.add(up_TKI, x_TH, self.pairs.get("up_proj", {}))
        inner_TKI = self.base.act_fn(gate_TKI) * up_TKI
        y_PH = ExpertMatmul.apply(inner_TKI.flatten(0, 1), self.base.down_proj, groups)
        y_TKH = slots.add(y_PH.view(tokens, count, -1), inner_TKI, self.pairs.get("down_proj", {}))
        return (y_TKH * weights_TK[..., None]).sum(1).to(x_TH.dtype)


@dataclass(frozen=True)
class Slots:
    """The adapter of each token of a layer, given `experts` (T, K). Adapters of equal rank share products."""

    parts: Sequence[Part]
    experts: Tensor
    ops: Any
    _plans: dict[tuple[int, ...], tuple[Tensor, Any]] = field(default_factory=dict)

    def add(self, y_TKO: Tensor, x: Tensor, pairs: Mapping[int, tuple[Tensor, Tensor, float]]) -> Tensor:
        """Return y (T, K, O) plus each part's product of one projection; `x` is (T, D) or (T, K, D)."""
        by_rank: dict[int, list[int]] = {}
        for number, (a_ERD, _, _) in pairs.items():
            by_rank.setdefault(a_ERD.shape[1], []).append(number)
        for numbers in by_rank.values():
            slots_T, plan = self._plan(tuple(numbers))
            chosen = [pairs[number] for number in numbers]
            # In the base's dtype, rounded as `Adapter.canonical` rounds what the engine serves.
            a_SERD = torch.stack([a.to(x.dtype) for a, _, _ in chosen])
            b_SERO = torch.stack([served(b, scale, x.dtype) for _, b, scale in chosen])
            b_SEOR = b_SERO.transpose(2, 3)
            y_TKO = y_TKO + lora(x, a_SERD, b_SEOR, slots_T, self.experts, ops=self.ops, plan=plan)
        return y_TKO

    def _plan(self, numbers: tuple[int, ...]) -> tuple[Tensor, Any]:
        """Return each token's slot, -1 outside the parts `numbers`, and the routing plan."""
        if numbers not in self._plans:
            slots_T = self.experts.new_full((len(self.experts),), -1)
            for slot, number in enumerate(numbers):
                slots_T[self.parts[number].span] = slot
            self._plans[numbers] = slots_T, self.ops.plan(slots_T, self.experts)
        return self._plans[numbers]


def slotted_experts(base: Any) -> SlottedExperts:
    """Wrap a layer's experts; `BaseModelError` when their parameters have another layout."""
    if base.has_bias or base.is_transposed or not base.is_concatenated:
        raise BaseModelError(
            f"The trainer cannot train {type(base).__name__}: it has biases, transposed weights, or "
            "alternating rows of gate and up. Set base.name to a base of another family."
        )
    return SlottedExperts(base)
