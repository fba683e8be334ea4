"""A frozen projection plus the factors of the active adapters, each for its own tokens.

An adapter's tokens are adjacent, so each adapter is two matrix products on its span, at its own rank.

Shape suffixes: _T tokens, _R rank, _I input features, _O output features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from engine.training.model.adapter import Part


class LoRAMatmul(Function):
    """`x @ W.T + x @ A.T @ (scale * B).T` for each span; W is frozen, x and the factors get gradients.

    LoRA (arXiv 2106.09685, equation 3). A custom backward, because autograd would keep and add a whole output
    for each product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        spans: Any,
        scales: Any,
        *factors: Tensor,
    ) -> Tensor:
        """Return y (T, O) of x (T, I) and weight (O, I); `factors` are A (R, I) and B (O, R) of each span."""
        y_TO = linear(x_TI, weight_OI, bias_O)
        hidden = []
        for span, scale, a_RI, b_OR in zip(spans, scales, factors[::2], factors[1::2], strict=True):
            hidden.append(x_TI[span] @ a_RI.to(x_TI.dtype).T)
            y_TO[span].addmm_(hidden[-1], served(b_OR, scale, x_TI.dtype).T)
        ctx.spans, ctx.scales = spans, scales
        ctx.save_for_backward(x_TI, weight_OI, *factors, *hidden)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, and of each A and B in float32."""
        x_TI, weight_OI, *saved = ctx.saved_tensors
        count = len(ctx.spans)
        factors, hidden = saved[: 2 * count], saved[2 * count :]
        dy_TO, found = grads[0], list[Tensor | None]()
        dx_TI = dy_TO @ weight_OI if ctx.needs_input_grad[0] else None
        parts = zip(ctx.spans, ctx.scales, factors[::2], factors[1::2], hidden, strict=True)
        for span, scale, a_RI, b_OR, h_TR in parts:
            dh_TR = dy_TO[span] @ served(b_OR, scale, dy_TO.dtype)
            if dx_TI is not None:
                dx_TI[span].addmm_(dh_TR, a_RI.to(dy_TO.dtype))
            found += [(dh_TR.T @ x_TI[span]).float(), (dy_TO[span].T @ h_TR).float() * scale]
        return dx_TI, None, None, None, None, *found


def served(b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return `scale * B` in `dtype`, rounded as `Adapter.canonical` rounds what the engine serves."""
    return (b * scale).to(dtype)


class SlottedLinear(nn.Module):
    """A frozen projection that adds the products of the active adapters."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.spans: list[slice] = []
        self.scales: list[float] = []
        self.factors: list[Tensor] = []

    def switch(self, name: str, parts: Sequence[Part]) -> None:
        """Activate the adapters of `parts` that have factors at `name`, this module's path."""
        found = [(part.span, pair) for part in parts if (pair := part.adapter.pair(name))]
        self.spans = [span for span, _ in found]
        self.scales = [scale for _, (_, _, scale) in found]
        self.factors = [factor for _, (a, b, _) in found for factor in (a, b)]

    def forward(self, x: Tensor) -> Tensor:
        """Return y (..., O) of x (..., I) in the base's dtype."""
        if not self.factors:
            y: Tensor = self.base(x)
            return y
        flat = x.flatten(0, -2)
        y = LoRAMatmul.apply(flat, self.base.weight, self.base.bias, self.spans, self.scales, *self.factors)
        return y.view(*x.shape[:-1], -1)
