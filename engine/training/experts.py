"""The routed experts of a layer, frozen, with the factors of whichever adapter is switched on.

Knows transformers' modules of experts (version 5: `gate_up_proj` (E, 2I, H), the rows of up after those of
gate, and `down_proj` (E, H, I)). Chooses no expert: the router is the base's own.

Shapes: T tokens, K experts of a token, P = T*K pairs, E experts, H hidden size, I inner size, D width, O
outputs.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
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

    def linear(self, x: Tensor, weight_EOD: Tensor, each: int) -> Tensor:
        """Return each pair's product (P, O) with its expert's weight; `x` has a row for `each` pairs."""
        return grouped_mm(x[self.order // each], weight_EOD.transpose(1, 2), offs=self.ends)[self.place]


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
        both_TKI = groups.linear(x_TH, self.base.gate_up_proj, count).view(tokens, count, -1)
        gate_TKI, up_TKI = both_TKI.chunk(2, dim=-1)
        gate_TKI = self._add("gate_proj", gate_TKI, x_TH, experts_TK)
        up_TKI = self._add("up_proj", up_TKI, x_TH, experts_TK)
        inner_TKI = self.base.act_fn(gate_TKI) * up_TKI
        y_TKH = groups.linear(inner_TKI.flatten(0, 1), self.base.down_proj, 1).view(tokens, count, -1)
        y_TKH = self._add("down_proj", y_TKH, inner_TKI, experts_TK)
        return (y_TKH * weights_TK[..., None]).sum(1).to(x_TH.dtype)

    def _add(self, projection: str, y_TKO: Tensor, x: Tensor, experts_TK: Tensor) -> Tensor:
        """Add the adapter's part of one projection; `x` is (T, D) or (T, K, D)."""
        if projection not in self.factors:
            return y_TKO
        a_ERD, b_ERO, scale = self.factors[projection]
        # In the base's dtype, rounded as `Adapter.canonical` rounds them: what the engine serves.
        a_ERD, b_ERO = a_ERD.to(x.dtype), (b_ERO * scale).to(x.dtype)
        slots_T = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return y_TKO + lora(x, a_ERD[None], b_ERO.transpose(1, 2)[None], slots_T, experts_TK, ops=self.ops)


def slotted_experts(base: Any) -> SlottedExperts:
    """Wrap a layer's experts; `BaseModelError` when their parameters are laid out in another way."""
    if base.has_bias or base.is_transposed or not base.is_concatenated:
        raise BaseModelError(
            f"The trainer cannot train {type(base).__name__}: it has biases, transposed weights, or "
            "alternating rows of gate and up. Set base.name to a base of another family."
        )
    return SlottedExperts(base)
