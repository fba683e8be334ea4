"""One policy's LoRA factors in float32 with their Adam moments, and their canonical form.

All experts of a layer share two parameters for each projection: 128 experts are not 768 parameters.

Shapes: E experts, R rank, I input features, O output features.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.adapters.module_patterns import Patterns
from engine.base.families import PROJECTIONS, BaseShapes
from engine.errors import AdapterError, ConfigError

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Site:
    """A place for factors: a linear module (`experts` 0), or one projection of all experts of a layer."""

    name: str
    inputs: int
    outputs: int
    experts: int = 0

    def keys(self, side: str) -> list[str]:
        """Return the canonical names of the factors of one side, one for each expert."""
        parent, _, leaf = self.name.rpartition(".")
        if not self.experts:
            return [f"{self.name}.{side}"]
        return [f"{parent}.{number}.{leaf}.{side}" for number in range(self.experts)]


def sites_of(shapes: BaseShapes) -> dict[str, Site]:
    """Return every site of a base by name; a site of experts is `<path of experts>.<projection>`."""
    routed = [
        Site(f"{path}.{projection}", *experts.size(projection), experts.count)
        for path, experts in shapes.experts.items()
        for projection in PROJECTIONS
    ]
    linear = [Site(name, *size) for name, size in shapes.linear.items()]
    return {site.name: site for site in (*linear, *routed)}


def chosen_sites(sites: Mapping[str, Site], targets: Iterable[str]) -> dict[str, Site]:
    """Return the sites that match targets: projections, or ends of paths such as `layers.2.mlp.up_proj`.

    The rule of PEFT's `target_modules`. Raises `ConfigError` for targets that match nothing.
    """
    ends = {target: f".{target}" for target in targets}
    if unknown := sorted(
        target for target, end in ends.items() if not any(f".{name}".endswith(end) for name in sites)
    ):
        known = sorted({name.rpartition(".")[2] for name in sites})
        raise ConfigError(
            f"The base has no projections {', '.join(unknown)}. Choose from {', '.join(known)}."
        )
    return {name: site for name, site in sites.items() if f".{name}".endswith(tuple(ends.values()))}


def by_pattern(names: Collection[str], default: Number, patterns: Mapping[str, Number]) -> dict[str, Number]:
    """Return each name's value: that of the first pattern that matches the end of its path, or the default.

    The rule of PEFT's `rank_pattern` and `alpha_pattern`. Raises `ConfigError` for a pattern that matches
    nothing.
    """
    for pattern in patterns:
        try:
            covers = Patterns({pattern: True})
        except ValueError as error:
            raise ConfigError(f"The pattern {pattern!r} cannot be read: {error}. Correct it.") from None
        if not any(covers.get(name, False) for name in names):
            raise ConfigError(
                f"The pattern {pattern!r} matches no projection of the adapter. Correct or remove it."
            )
    chosen = Patterns(patterns)
    return {name: chosen.get(name, default) for name in names}


def ranks_at(sites: Mapping[str, Site], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rank of canonical tensors at each site that has any."""
    ranks = {
        name: max((len(tensors[key]) for key in site.keys("lora_A") if key in tensors), default=0)
        for name, site in sites.items()
    }
    return {name: rank for name, rank in ranks.items() if rank}


@dataclass(frozen=True)
class Part:
    """An adapter and its tokens: `span` of the tokens in one pass."""

    adapter: "Adapter"
    span: slice


class Adapter:
    """Factors at some sites; both sides are zero until they are initialised or loaded.

    `factors` are float32 parameters by `<site>.lora_A` and `<site>.lora_B`: (R, I) and (O, R) for a linear
    module, (E, R, I) and rank-major (E, R, O) for experts, the layout that their products read.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        ranks: Mapping[str, int],
        alphas: Mapping[str, float],
        device: torch.device,
    ):
        self.sites, self.rank = sites, max(ranks[name] for name in sites)
        self.scales = {name: alphas[name] / ranks[name] for name in sites}
        self.factors: dict[str, nn.Parameter] = {}
        for name, site in sites.items():
            rank, stack = ranks[name], (site.experts,) if site.experts else ()
            b = (rank, site.outputs) if site.experts else (site.outputs, rank)
            self.factors[f"{name}.lora_A"] = nn.Parameter(
                torch.zeros(*stack, rank, site.inputs, device=device)
            )
            self.factors[f"{name}.lora_B"] = nn.Parameter(torch.zeros(*stack, *b, device=device))
        self.optimizer = torch.optim.AdamW(self.factors.values(), lr=0.0, fused=True)

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the projections with factors in any layer."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.sites}))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Initialise every A as PEFT does: Kaiming uniform with a = sqrt(5)."""
        for name, site in self.sites.items():
            factor = self.factors[f"{name}.lora_A"]
            # Drawn on the CPU, so that a seed gives the same factors on every device.
            uniform = torch.rand(factor.shape, generator=generator) * 2 - 1
            factor.copy_(uniform * (1 / math.sqrt(site.inputs)))

    def pair(self, name: str) -> tuple[Tensor, Tensor, float] | None:
        """Return a site's A, B and scale, or None when the adapter has no factors there."""
        if name not in self.sites:
            return None
        return self.factors[f"{name}.lora_A"], self.factors[f"{name}.lora_B"], self.scales[name]

    @torch.no_grad()
    def canonical(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a revision's tensors on the CPU in `dtype`, with the scale folded into B (alpha = rank).

        A is (R, I) and B is (O, R) for each module; experts' tensors are views on one copy of their stack.
        """
        tensors: dict[str, Tensor] = {}
        for side, factor, site in self._stacks():
            folded = factor * self.scales[site.name] if side == "lora_B" else factor
            whole = folded.to("cpu", dtype, copy=True).contiguous()
            tensors |= zip(site.keys(side), whole.unbind(0) if site.experts else (whole,), strict=True)
        return tensors

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy canonical tensors into the first ranks of their sites; other values stay.

        Raises `AdapterError` for a tensor whose rank exceeds the site's.
        """
        places = (
            (key, part, site)
            for side, factor, site in self._stacks()
            for key, part in zip(site.keys(side), factor if site.experts else (factor,), strict=True)
        )
        for key, part, site in places:
            if key not in tensors:
                continue
            tensor, axis = tensors[key], 0 if key.endswith("lora_A") else 1
            if tensor.shape[axis] > part.shape[axis]:
                raise AdapterError(
                    f"The tensor {key} has rank {tensor.shape[axis]}, but the session has "
                    f"rank {part.shape[axis]} there. Raise `rank`."
                )
            if axis == 0:
                part[: len(tensor)] = tensor
            else:
                part[:, : tensor.shape[1]] = tensor.float() / self.scales[site.name]

    def _stacks(self) -> Iterator[tuple[str, Tensor, Site]]:
        """Yield each factor's side, its values in the canonical axis order, and its site."""
        for name, site in self.sites.items():
            a, b = (self.factors[f"{name}.{side}"].detach() for side in ("lora_A", "lora_B"))
            yield "lora_A", a, site
            yield "lora_B", b.transpose(-1, -2) if site.experts else b, site

    def step(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float
    ) -> float:
        """Take an AdamW step and clear the gradients; return their norm before clipping (`clip` 0: none)."""
        parameters = list(self.factors.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else math.inf)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.optimizer.param_groups[0].update(settings)
        self.optimizer.step()
        self.clear_gradients()
        return float(norm)

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return factors and Adam moments on the CPU, so that a session can continue on any device."""
        factors = {key: factor.detach().cpu().clone() for key, factor in self.factors.items()}
        optimizer = self.optimizer.state_dict()
        moments = {
            number: {name: value.cpu() for name, value in state.items()}
            for number, state in optimizer["state"].items()
        }
        return {"factors": factors, "optimizer": {**optimizer, "state": moments}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], moments: bool = True) -> None:
        """Load what `state_dict` returned and drop all gradients; without `moments` Adam begins anew."""
        for key, factor in self.factors.items():
            factor.copy_(state["factors"][key])
        if moments:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.state.clear()
        self.clear_gradients()
