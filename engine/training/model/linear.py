"""The products with frozen weights: projections with the factors of the active adapters, and the head.

An adapter's tokens are adjacent, so each adapter is two matrix products on its span, at its own rank.

The head gives log-probabilities and entropies, with the logits of `HEAD_TOKENS` tokens at a time. It is
frozen, and a loss's gradient of a token's log-probability is one number. So the gradient of the hidden state
is that number times a row that does not depend on the loss: `W[c] - sum_v p(v) W[v]` for the chosen token c.
The forward pass computes the row while the logits are there, and keeps it instead of them: as many products
as with logits that are kept, and nothing is recomputed.

Shape suffixes: _T tokens, _C tokens of a chunk, _R rank, _I input features, _O output features, _H hidden
size, _V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from engine.planning.memory import HEAD_TOKENS
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
        dy_TO, factor_grads = grads[0], list[Tensor | None]()
        dx_TI = dy_TO @ weight_OI if ctx.needs_input_grad[0] else None
        parts = zip(ctx.spans, ctx.scales, factors[::2], factors[1::2], hidden, strict=True)
        for span, scale, a_RI, b_OR, h_TR in parts:
            dh_TR = dy_TO[span] @ served(b_OR, scale, dy_TO.dtype)
            if dx_TI is not None:
                dx_TI[span].addmm_(dh_TR, a_RI.to(dy_TO.dtype))
            factor_grads += [(dh_TR.T @ x_TI[span]).float(), (dy_TO[span].T @ h_TR).float() * scale]
        return dx_TI, None, None, None, None, *factor_grads


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
        pairs = [(part.span, pair) for part in parts if (pair := part.adapter.pair(name))]
        self.spans = [span for span, _ in pairs]
        self.scales = [scale for _, (_, _, scale) in pairs]
        self.factors = [factor for _, (a, b, _) in pairs for factor in (a, b)]

    def forward(self, x: Tensor) -> Tensor:
        """Return y (..., O) of x (..., I) in the base's dtype."""
        if not self.factors:
            y: Tensor = self.base(x)
            return y
        flat = x.flatten(0, -2)
        y = LoRAMatmul.apply(flat, self.base.weight, self.base.bias, self.spans, self.scales, *self.factors)
        return y.view(*x.shape[:-1], -1)


class ChosenLogprobs(Function):
    """Each chosen token's log-probability, with gradient, and its distribution's entropy, without."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, chosen_T: Tensor, weight_VH: Tensor, bias_V: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (T) and entropies (T) in nats, float32."""
        # Parts of equal size: a product of very few rows would round differently.
        count = -(-len(chosen_T) // HEAD_TOKENS)
        parts = zip(hidden_TH.tensor_split(count), chosen_T.tensor_split(count), strict=True)
        columns = [_chunk(*part, weight_VH, bias_V, ctx.needs_input_grad[0]) for part in parts]
        logprob_T, entropy_T, slope_TH = (torch.cat(column) for column in zip(*columns, strict=True))
        ctx.save_for_backward(slope_TH)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the hidden states (T, H)."""
        (slope_TH,) = ctx.saved_tensors
        return (grads[0][:, None] * slope_TH).to(slope_TH.dtype), None, None, None


def _chunk(
    hidden_CH: Tensor, chosen_C: Tensor, weight_VH: Tensor, bias_V: Tensor | None, sloped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (C), entropies (C), and with `sloped` the former's gradients (C, H)."""
    logits_CV = linear(hidden_CH, weight_VH, bias_V).float()
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    chance_CV = (logits_CV - largest_C1).exp_()
    total_C1 = chance_CV.sum(dim=1, keepdim=True)
    whole_C = (total_C1.log() + largest_C1)[:, 0]
    chance_CV.div_(total_C1)
    logprob_C = logits_CV.gather(1, chosen_C[:, None])[:, 0] - whole_C
    # In place: `vecdot` would hold a third table of the chunk's tokens and the vocabulary.
    entropy_C = whole_C - logits_CV.mul_(chance_CV).sum(dim=1)
    if not sloped:
        return logprob_C, entropy_C, hidden_CH[:0]
    toward_CV = chance_CV.neg_().scatter_add_(1, chosen_C[:, None], torch.ones_like(total_C1))
    return logprob_C, entropy_C, toward_CV.to(weight_VH.dtype) @ weight_VH
