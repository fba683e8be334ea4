"""One policy's LoRA factors in float32 with their Adam moments, and their canonical form.

The experts of a layer share two parameters a projection, so that 128 experts are not 768 parameters.
Knows tensors and names of modules. Knows no base, no session and no files.

Shapes: E experts, R rank, I input features, O output features.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.adapters.families import PROJECTIONS, BaseShapes
from engine.errors import AdapterError


@dataclass(frozen=True)
class Site:
    """Where factors may sit: a linear module, or one projection of all `experts` of a layer (0: linear)."""

    name: str
    inputs: int
    outputs: int
    experts: int = 0

    def keys(self, side: str) -> list[str]:
        """Return the canonical names of one side's factors, one an expert."""
        parent, _, leaf = self.name.rpartition(".")
        if not self.experts:
            return [f"{self.name}.{side}"]
        return [f"{parent}.{number}.{leaf}.{side}" for number in range(self.experts)]


def sites_of(shapes: BaseShapes) -> dict[str, Site]:
    """Return every site of a base by its name; experts' are called `<path of experts>.<projection>`."""
    routed = [
        Site(f"{path}.{projection}", *experts.size(projection), experts.count)
        for path, experts in shapes.experts.items()
        for projection in PROJECTIONS
    ]
    linear = [Site(name, *size) for name, size in shapes.linear.items()]
    return {site.name: site for site in (*linear, *routed)}


@dataclass(frozen=True)
class Part:
    """An adapter and the tokens that are its: `span` of those that go through the base together."""

    adapter: "Adapter"
    span: slice


class Adapter:
    """Factors at some sites; both sides are zero until they are drawn or loaded.

    `factors` are parameters by `<site>.lora_A` and `<site>.lora_B`: (R, I) and (O, R) of a linear module,
    (E, R, I) and rank-major (E, R, O) of experts, which is how their products read them.
    """

    def __init__(self, sites: Mapping[str, Site], rank: int, alpha: float, device: torch.device):
        self.sites, self.rank, self.alpha = sites, rank, alpha
        self.factors: dict[str, nn.Parameter] = {}
        for name, site in sites.items():
            stack = (site.experts,) if site.experts else ()
            b = (rank, site.outputs) if site.experts else (site.outputs, rank)
            self.factors[f"{name}.lora_A"] = nn.Parameter(
                torch.zeros(*stack, rank, site.inputs, device=device)
            )
            self.factors[f"{name}.lora_B"] = nn.Parameter(torch.zeros(*stack, *b, device=device))
        self.optimizer = torch.optim.AdamW(self.factors.values(), lr=0.0, fused=True)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw every A by PEFT's default, Kaiming uniform with a = sqrt(5); with B zero it is the base."""
        for name, site in self.sites.items():
            factor = self.factors[f"{name}.lora_A"]
            # Drawn on the CPU, so that a seed means the same factors on every device.
            uniform = torch.rand(factor.shape, generator=generator) * 2 - 1
            factor.copy_(uniform * (1 / math.sqrt(site.inputs)))

    def pair(self, name: str) -> tuple[Tensor, Tensor, float] | None:
        """Return a site's A, B and scale, or None where this adapter has nothing."""
        if name not in self.sites:
            return None
        return self.factors[f"{name}.lora_A"], self.factors[f"{name}.lora_B"], self.scale

    @torch.no_grad()
    def canonical(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a revision's tensors on the CPU: alpha folded into B so that it equals rank, in `dtype`.

        Experts' tensors are views on one copy of their stack.
        """
        tensors: dict[str, Tensor] = {}
        for side, factor, site in self._stacks():
            folded = factor * self.scale if side == "lora_B" else factor
            whole = folded.to("cpu", dtype, copy=True).contiguous()
            tensors |= zip(site.keys(side), whole.unbind(0) if site.experts else (whole,), strict=True)
        return tensors

    def load_canonical(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a revision's tensors; `AdapterError` when they are for other modules or another rank."""
        parts = self._parts()
        for key, part in parts.items():
            found = tensors.get(key)
            if found is None or found.shape != part.shape or len(tensors) != len(parts):
                shape = None if found is None else tuple(found.shape)
                raise AdapterError(
                    f"The parent's tensor {key} is {shape}; this policy needs {tuple(part.shape)}."
                )
        self.place(tensors)

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Write canonical tensors of at most this rank into the first ranks; what is not given stays."""
        parts = self._parts()
        for key, tensor in tensors.items():
            if key.endswith("lora_A"):
                parts[key][: len(tensor)] = tensor
            else:
                parts[key][:, : tensor.shape[1]] = tensor.float() / self.scale

    def _stacks(self) -> Iterator[tuple[str, Tensor, Site]]:
        """Yield each factor's side, its values with the axes of the canonical form, and its site."""
        for name, site in self.sites.items():
            a, b = (self.factors[f"{name}.{side}"].detach() for side in ("lora_A", "lora_B"))
            yield "lora_A", a, site
            yield "lora_B", b.transpose(-1, -2) if site.experts else b, site

    def _parts(self) -> dict[str, Tensor]:
        """Return a view on every canonical tensor's place."""
        parts: dict[str, Tensor] = {}
        for side, factor, site in self._stacks():
            parts |= zip(site.keys(side), factor if site.experts else (factor,), strict=True)
        return parts

    def step(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float
    ) -> float:
        """Apply and clear the gathered gradients by AdamW; return their norm before clipping to `clip`."""
        parameters = list(self.factors.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else math.inf)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.optimizer.param_groups[0].update(settings)
        self.optimizer.step()
        self.clear_gradients()
        return float(norm)

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return factors and Adam moments on the CPU, so that a session goes on on any device."""
        factors = {key: factor.detach().cpu().clone() for key, factor in self.factors.items()}
        optimizer = self.optimizer.state_dict()
        moments = {
            number: {name: value.cpu() for name, value in state.items()}
            for number, state in optimizer["state"].items()
        }
        return {"factors": factors, "optimizer": {**optimizer, "state": moments}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, factor in self.factors.items():
            factor.copy_(state["factors"][key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.clear_gradients()
