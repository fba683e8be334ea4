"""What the tests and benchmarks of this package share: routed batches, and how near is near enough."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts import reference

# The unit in the last place of 1: what one rounding may move a value by, half of it at most.
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class Routed:
    """Tokens with their adapters, experts and routing weights, and two factors.

    Shapes: x (T, I) or (T, K, I), a (S, E, R, I), b (S, E, O, R), slots (T), experts and weights (T, K).
    """

    x: Tensor
    a: Tensor
    b: Tensor
    slots: Tensor
    experts: Tensor
    weights: Tensor

    def to(self, dtype: torch.dtype) -> "Routed":
        """Return the same numbers in another dtype."""
        x, a, b, weights = (v.to(dtype) for v in (self.x, self.a, self.b, self.weights))
        return Routed(x, a, b, self.slots, self.experts, weights)


def routed(
    slots: Sequence[int],
    top_k: int = 2,
    experts: int = 4,
    rank: int = 3,
    inputs: int = 17,
    outputs: int = 13,
    shared: str = "",
    rows: str = "token",
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
) -> Routed:
    """Make a batch in which whatever must not be read is NaN.

    `shared` names the factors with one expert ("A", "B", "AB"); `rows` says whether x has a row a
    "token" or a "pair". Base tokens' rows, and segments that no pair names, are poisoned.
    """
    g = torch.Generator().manual_seed(seed)
    tokens, adapters = len(slots), max([*slots, 0]) + 2
    slots_T = torch.tensor(slots, dtype=torch.long)
    experts_TK = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
    x = torch.randn(*((tokens,) if rows == "token" else (tokens, top_k)), inputs, generator=g)
    a = torch.randn(adapters, 1 if "A" in shared else experts, rank, inputs, generator=g)
    b = torch.randn(adapters, 1 if "B" in shared else experts, outputs, rank, generator=g)
    x[slots_T < 0] = torch.nan
    for factor in (a, b):
        named = torch.zeros(factor.shape[:2], dtype=torch.bool)
        for slot, chosen in zip(slots, experts_TK.tolist(), strict=True):
            if slot >= 0:
                named[slot, [0] if factor.shape[1] == 1 else chosen] = True
        factor[~named] = torch.nan
    weights_TK = torch.rand(tokens, top_k, generator=g)
    # Rounded first, so that the yardstick in float64 starts from the very same numbers.
    a, b, x, weights_TK = (v.to(dtype) for v in (a, b, x, weights_TK))
    return Routed(x, a, b, slots_T, experts_TK, weights_TK)


def reference_gradients(batch: Routed, dy_TKO: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of x, A and B through the reference's loops without weights, in float64."""
    exact = batch.to(torch.float64)
    leaves = [value.detach().requires_grad_() for value in (exact.x, exact.a, exact.b)]
    x, a, b = leaves
    y = torch.zeros(dy_TKO.shape, dtype=torch.float64)
    h = reference.shrink_experts(x, a, batch.slots, batch.experts)
    reference.expand_experts(y, h, b, batch.slots, batch.experts)
    return torch.autograd.grad(y, leaves, dy_TKO.double())


def rank_major(b_SEOR: Tensor) -> Tensor:
    """Return the same values with the memory of slot buffers: (S, E, R, O)."""
    return b_SEOR.transpose(-1, -2).contiguous().transpose(-1, -2)


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference over the yardstick's largest value; NaN is never near."""
    if not want.numel():
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))
