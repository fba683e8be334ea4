"""Policy losses as pure functions, each with its paper.

A loss returns a term for each token and the mask of clipped tokens. `LOSSES` says what the mean is taken
over: it needs the whole batch, so `Objective` weights the terms by `Tokens.weight_T`.

Shape suffixes: _P pairs, _T completion tokens one after another, _N sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.errors import ConfigError
from engine.settings.own_functions import load_own


@dataclass(frozen=True)
class Tokens:
    """Completion tokens of whole sequences, one sequence after another; log-probabilities are float32 (T).

    `new_T`: under the trained adapter, with gradient. `old_T`: as sampled. `base_T`: without an adapter, or
    None. `advantage_T`: advantages. `sequence_T`: each token's sequence number, 0 to `sequences` - 1.
    `weight_T`: each token's weight in the mean or sum over the whole batch. `low_T` and `high_T`: bounds of
    the ratio, or None for those of the settings. `mask_T`: 1 where a token counts in `means`, or None.
    """

    new_T: Tensor
    old_T: Tensor
    advantage_T: Tensor
    sequence_T: Tensor
    sequences: int
    weight_T: Tensor
    base_T: Tensor | None = None
    low_T: Tensor | None = None
    high_T: Tensor | None = None
    mask_T: Tensor | None = None

    def sums(self, value_T: Tensor) -> Tensor:
        """Return the sum (N) over each sequence's tokens."""
        return value_T.new_zeros(self.sequences).index_add(0, self.sequence_T, value_T)

    def means(self, value_T: Tensor) -> Tensor:
        """Return, for each token, the mean over its sequence's tokens, (T)."""
        if self.mask_T is None:
            return (self.sums(value_T) / self.sums(torch.ones_like(value_T)))[self.sequence_T]
        # A sequence without any such token has the mean 0.
        count_N = self.sums(self.mask_T).clamp(min=1)
        return (self.sums(value_T * self.mask_T) / count_N)[self.sequence_T]

    def clip(self, ratio_T: Tensor, settings: "Settings") -> Tensor:
        """Return the ratios within their bounds."""
        low = 1 - settings["clip_low"] if self.low_T is None else self.low_T
        high = 1 + settings["clip_high"] if self.high_T is None else self.high_T
        return ratio_T.clamp(min=low).clamp(max=high)


Settings = Mapping[str, Any]
Terms = tuple[Tensor, Tensor]


def cross_entropy(tokens: Tokens, settings: Settings) -> Terms:
    """Return the negative log-likelihood, for supervised fine-tuning without samples and advantages."""
    return _free(-tokens.new_T)


def importance_sampling(tokens: Tokens, settings: Settings) -> Terms:
    """Return the unclipped policy-gradient surrogate with importance sampling.

    "Conservative policy iteration" in PPO (arXiv 1707.06347, equation 6).
    """
    return _free(-torch.exp(tokens.new_T - tokens.old_T) * tokens.advantage_T)


def ppo(tokens: Tokens, settings: Settings) -> Terms:
    """Return PPO's clipped surrogate (arXiv 1707.06347, equation 7); GRPO, Dr. GRPO and DAPO share it."""
    return _clipped(torch.exp(tokens.new_T - tokens.old_T), tokens, settings)


def gspo(tokens: Tokens, settings: Settings) -> Terms:
    """Return the surrogate clipped by whole sequences' ratios, averaged as in `grpo`.

    GSPO (arXiv 2507.18071), equation 7, in the form of its section 4.3: each token has its sequence's ratio
    as value and its own log-probability as gradient. Both forms are equal when a sequence has one advantage.
    """
    gap_T = tokens.means((tokens.new_T - tokens.old_T).detach())
    ratio_T = torch.exp(gap_T + tokens.new_T - tokens.new_T.detach())
    return _clipped(ratio_T, tokens, settings)


def cispo(tokens: Tokens, settings: Settings) -> Terms:
    """Return REINFORCE weighted by the clipped ratio, a mean over tokens; clipped tokens keep a gradient.

    MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, without a lower bound. The upper bound of 5 is from
    ScaleRL (arXiv 2510.13786).
    """
    ratio_T = torch.exp(tokens.new_T - tokens.old_T).detach()
    weight_T = tokens.clip(ratio_T, settings)
    return -weight_T * tokens.advantage_T * tokens.new_T, weight_T != ratio_T


def dro(tokens: Tokens, settings: Settings) -> Terms:
    """Return the advantage-weighted log-likelihood with a quadratic penalty on the log-ratio.

    The form of Tinker's loss `dro`, after Direct Reward Optimisation (arXiv 2405.19107). The penalty has a
    gradient where advantages are zero; a policy's groups without spread are left out, so it moves nothing.
    """
    gap_T = tokens.new_T - tokens.old_T
    return _free(-(tokens.advantage_T * tokens.new_T - settings["beta"] / 2 * gap_T**2))


def dpo(tokens: Tokens, settings: Settings) -> Terms:
    """Return each pair's loss at all its tokens; sequence 2k is chosen and 2k + 1 rejected.

    Direct preference optimisation (arXiv 2305.18290), equation 7; the reference is the base.
    """
    assert tokens.base_T is not None
    gain_N = tokens.sums(tokens.new_T - tokens.base_T)
    loss_P = -logsigmoid(settings["beta"] * (gain_N[0::2] - gain_N[1::2]))
    return _free(loss_P[tokens.sequence_T // 2])


def kl_to_base(new_T: Tensor, base_T: Tensor) -> Tensor:
    """Estimate each token's KL divergence to the base (T), in nats: unbiased, non-negative, differentiable.

    DeepSeekMath (arXiv 2402.03300), equation 4; k3 of Schulman, "Approximating KL divergence" (2020).
    """
    gap_T = base_T - new_T
    return torch.exp(gap_T) - gap_T - 1


def _free(term_T: Tensor) -> Terms:
    return term_T, torch.zeros_like(term_T, dtype=torch.bool)


def _clipped(ratio_T: Tensor, tokens: Tokens, settings: Settings) -> Terms:
    plain_T, held_T = ratio_T * tokens.advantage_T, tokens.clip(ratio_T, settings) * tokens.advantage_T
    return -torch.minimum(plain_T, held_T), held_T < plain_T


@dataclass(frozen=True)
class Loss:
    """A loss and its mean: over all tokens, over each unit's tokens and then units, or by a fixed budget.

    `unit` consecutive sequences belong together. `sampled`: it needs the sampler's log-probabilities and
    advantages. `by_spread`: advantages are divided by their group's standard deviation. `drops`: groups
    without spread are left out and do not count in the mean.
    """

    terms: Callable[[Tokens, Settings], Terms]
    per: Literal["token", "unit", "budget"] = "token"
    unit: int = 1
    sampled: bool = True
    needs_base: bool = False
    by_spread: bool = True
    drops: bool = False


LOSSES = {
    "cross_entropy": Loss(cross_entropy, sampled=False),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo),
    # DeepSeekMath (arXiv 2402.03300), equation 3: the mean over each answer, and then over answers. Its KL
    # term is the setting `kl` here.
    "grpo": Loss(ppo, per="unit"),
    # "Understanding R1-Zero-like training" (arXiv 2503.20783), section 3.2: neither an answer's length nor a
    # group's spread weights its gradient. The budget is that of tokens (its listing 1).
    "dr_grpo": Loss(ppo, per="budget", by_spread=False),
    # DAPO (arXiv 2503.14476): clip-higher in section 3.1, by its settings; token-level loss in section 3.3.
    "dapo": Loss(ppo, drops=True),
    "gspo": Loss(gspo, per="unit"),
    "cispo": Loss(cispo, drops=True),
    "dro": Loss(dro, drops=True),
    "dpo": Loss(dpo, per="unit", unit=2, sampled=False, needs_base=True),
}


def loss_of(name: str) -> Loss:
    """Return a loss by name, or a custom one by `python:MODULE:FUNC`; `ConfigError` when there is none.

    A custom loss is called with `Tokens` and the setting `options`. It returns one term for each token (T);
    the loss is their mean over all tokens.
    """
    if not name.startswith("python:"):
        return LOSSES[name]
    return Loss(partial(_own, load_own("loss", name, "tokens, settings")))


def _own(function: Callable[[Tokens, Settings], Tensor], tokens: Tokens, settings: Settings) -> Terms:
    term_T = function(tokens, settings)
    if not isinstance(term_T, Tensor) or term_T.shape != tokens.new_T.shape or not term_T.requires_grad:
        raise ConfigError("A custom loss must return a tensor of the shape of new_T that depends on new_T.")
    return _free(term_T)
