"""Log-probabilities and entropies of tokens, with the logits of `HEAD_TOKENS` tokens at a time.

The head is frozen, and a loss's gradient of a token's log-probability is one number. So the gradient of the
hidden state is that number times a row that does not depend on the loss: `W[c] - sum_v p(v) W[v]` for the
chosen token c. The forward pass computes the row while the logits are there, and keeps it instead of them: as
many products as with logits that are kept, and nothing is recomputed.

Shape suffixes: _T completion tokens, _C tokens of a chunk, _H hidden size, _V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from engine.planning.memory import HEAD_TOKENS


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
        found = [_chunk(*part, weight_VH, bias_V, ctx.needs_input_grad[0]) for part in parts]
        logprob_T, entropy_T, slope_TH = (torch.cat(column) for column in zip(*found, strict=True))
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
