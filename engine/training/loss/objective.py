"""A loss with its settings over the tokens of a microbatch: corrections, weights, gradient, metrics.

The weights of all tokens are computed from the whole batch first, so the gradient does not depend on how the
examples are cut into microbatches.

Corrections are for samples that another program or an older revision drew: weights and masks by token.

All use rho, the trainer's probability of a token over the sampler's, without gradient. A loss's own ratio
already contains rho, since it compares the trainer with the sampler too. Therefore

- masks (outlier, geometric) remove tokens and leave the loss as it is;
- weights (tis, icepop) multiply a token's term by rho, and the loss's own ratio is then taken against the
  trainer itself, not the sampler: otherwise rho would count twice. This is decoupled PPO (arXiv 2110.00641;
  AReaL, arXiv 2505.24298) with the current trainer as the proximal policy. That ratio has the value 1, so the
  loss's clip does not bind; the cap or the band bounds the step instead.

A masked token has no gradient, not even through the KL term. It still counts in the loss's divisor: the mean
is over all sampled tokens, as in IcePop's paper, and does not depend on the packing.

Shape suffixes: _T completion tokens, one example after another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.settings.losses import SUMMED, Band, LossConfig, loss_config
from engine.threads import bounded
from engine.training.loss.grpo import Loss, Tokens, kl_to_base, loss_of

CAP = 2.0
GEOMETRIC: Band = (0.99, 1.01)
ICEPOP: Band = (0.5, 2.0)
OUTLIER: Band = (1e-4, 100.0)
# Ratios are capped at e^60 where they are measured: JSON has no infinity.
LARGEST_GAP = 60.0
Bound = TypeVar("Bound", float, Band)
T = TypeVar("T")


@dataclass(frozen=True)
class Corrected:
    """Tokens as the loss sees them, their weights `factor_T`, and what was masked and capped.

    `masked` has a mask (T) for each reason; a token is in the first that applies. `capped_T` marks tokens
    whose weight was capped.
    """

    tokens: Tokens
    factor_T: Tensor
    masked: dict[str, Tensor]
    capped_T: Tensor


def correct(tokens: Tokens, config: LossConfig) -> Corrected:
    """Return the tokens with the enabled corrections, of which losses without samples have none.

    tis: rho up to a cap (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025; as in V-trace, arXiv 1802.01561). icepop: rho within its band, and 0 outside
    (Ring-1T, arXiv 2510.18855).
    """
    gap_T = tokens.new_T.detach() - tokens.old_T
    rho_T = torch.exp(gap_T)
    masked = masks(tokens, gap_T, config)
    out_T = torch.zeros_like(rho_T, dtype=torch.bool)
    for mask_T in masked.values():
        out_T = out_T | mask_T
    weighs = bool(config.tis or config.icepop)
    weight_T = rho_T if weighs else torch.ones_like(rho_T)
    capped_T = torch.zeros_like(out_T)
    if config.tis:
        weight_T = rho_T.clamp(max=bound(config.tis, CAP))
        capped_T = (weight_T < rho_T) & ~out_T
    # A masked ratio may be infinite, and 0 * inf is NaN, so it is replaced by 1.
    old_T = tokens.new_T.detach() if weighs else torch.where(out_T, tokens.new_T.detach(), tokens.old_T)
    return Corrected(replace(tokens, old_T=old_T), weight_T.masked_fill(out_T, 0.0), masked, capped_T)


def masks(tokens: Tokens, gap_T: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Return a mask (T) for each enabled reason; no token is in two.

    outlier: sequences with a token whose rho is outside a wide band (the veto of SkyRL and verl).
    geometric: sequences whose rho, a geometric mean over tokens, is outside the band (Liu et al., "When speed
    kills stability", 2025; as in GSPO, arXiv 2507.18071, equation 7).
    icepop: tokens whose rho is outside the band (Ring-1T, arXiv 2510.18855).
    """
    masks: dict[str, Tensor] = {}
    if config.outlier:
        far_T = outside(gap_T, bound(config.outlier, OUTLIER))
        masks["outlier"] = tokens.means(far_T.float()) > 0
    if config.geometric:
        masks["geometric"] = outside(tokens.means(gap_T), bound(config.geometric, GEOMETRIC))
    if config.icepop:
        masks["icepop"] = outside(gap_T, bound(config.icepop, ICEPOP))
    before_T = torch.zeros_like(gap_T, dtype=torch.bool)
    for reason, mask_T in masks.items():
        masks[reason], before_T = mask_T & ~before_T, before_T | mask_T
    return masks


def outside(gap_T: Tensor, band: Band) -> Tensor:
    """Return a mask (T) of the ratios outside a band, given their logarithms."""
    ratio_T = torch.exp(gap_T)
    return (ratio_T < band[0]) | (ratio_T > band[1])


def bound(given: Bound | bool, vetted: Bound) -> Bound:
    """Return a correction's given bound, or the default when it is only enabled."""
    return vetted if isinstance(given, bool) else given


@dataclass(frozen=True)
class Objective:
    """A loss with its settings: name and config as given, and the loss's own values.

    With `sums` it is the plain sum over all tokens, not the loss's own mean.
    """

    name: str
    loss: Loss
    config: LossConfig
    values: Mapping[str, Any]
    sums: bool = False

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any], sums: bool = False) -> "Objective":
        """Return the objective; `ConfigError` for an unknown loss, or an unknown or invalid setting."""
        config = loss_config(name, given)
        if sums and (name not in SUMMED or config.kl):
            said = f"setting kl of {name}" if name in SUMMED else f"loss {name}"
            raise ConfigError(
                f"The {said} has no plain sum. Choose a loss of {', '.join(SUMMED)} without kl, or the "
                "reduction mean."
            )
        return cls(name, _in_time(name, config, partial(loss_of, name)), config, config.values(name), sums)

    @property
    def needs_base(self) -> bool:
        """Say whether the base's log-probabilities are needed."""
        return self.loss.needs_base or self.config.kl > 0

    def terms(self, tokens: Tokens) -> tuple[Tensor, Tensor, Corrected]:
        """Return each token's part of the loss (T), the mask of clipped tokens (T), and the corrections."""
        corrected = correct(tokens, self.config)
        term_T, clipped_T = self.loss.terms(corrected.tokens, self.values)
        if self.config.kl:
            assert tokens.base_T is not None
            term_T = term_T + self.config.kl * kl_to_base(tokens.new_T, tokens.base_T)
        return term_T * corrected.factor_T * tokens.weight_T, clipped_T, corrected

    def gradient(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Corrected]:
        """Return the gradient of `new_T` (T), then `terms`; `ConfigError` when they exceed the time limit."""

        def differentiated() -> tuple[Tensor, Tensor, Tensor, Corrected]:
            loss_T, clipped_T, corrected = self.terms(tokens)
            (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.new_T)
            return gradient_T, loss_T, clipped_T, corrected

        return _in_time(self.name, self.config, differentiated)

    def shares(self, lengths: Sequence[int]) -> list[float]:
        """Return the weight of each example's tokens over the whole batch, given all lengths."""
        if self.sums:
            return [1.0] * len(lengths)
        if self.loss.per == "token":
            return [1 / sum(lengths)] * len(lengths)
        if self.loss.per == "budget":
            return [1 / (len(lengths) * self.values["budget"])] * len(lengths)
        size = self.loss.unit
        units = [sum(lengths[i : i + size]) for i in range(0, len(lengths), size)]
        return [1 / (len(units) * units[i // size]) for i in range(len(lengths))]


def _in_time(name: str, config: LossConfig, call: Callable[[], T]) -> T:
    """Call a function; a custom loss has a time limit, since a hanging one would block all sessions."""
    return bounded(f"loss {name}", config.timeout_s, call) if name.startswith("python:") else call()


def refuse_broken(loss_T: Tensor, gradient_T: Tensor, tokens: Tokens, numbers: Sequence[int]) -> None:
    """Raise `ConfigError` with the number of the first sample whose loss or gradient is not finite."""
    broken_T = ~(loss_T.isfinite() & gradient_T.isfinite())
    if broken_T.any():
        places = broken_T.nonzero()[:, 0].tolist()
        first = min(places, key=lambda place: numbers[int(tokens.sequence_T[place])])
        sample = numbers[int(tokens.sequence_T[first])]
        raise ConfigError(
            f"The loss of sample {sample} is not a finite number (trainer {tokens.new_T[first].item():.4g}, "
            f"sampler {tokens.old_T[first].item():.4g}, advantage {tokens.advantage_T[first].item():.4g}). "
            "Nothing was changed. Leave the sample out, or check its log-probabilities and advantages."
        )


@dataclass(frozen=True)
class BatchMetrics:
    """Metrics of a batch; means are over its completion tokens, entropies and divergences in nats.

    Ratios are trainer over sampler and `kl_old` is the divergence between both, None without samples. `kl` is
    the divergence to the base, None when not computed. `masked` counts masked tokens by reason, `capped`
    tokens whose weight was capped; `correction_weight` is the mean weight of corrections; `learned_tokens`
    counts tokens with a gradient. `out_of_route` is the share of tokens for which the trainer's router would
    choose other experts than the engine, None without the engine's choice.
    """

    loss: float
    importance_ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    kl: float | None
    kl_old: float | None
    entropy: float
    clip_fraction: float
    masked: dict[str, int]
    capped: int
    correction_weight: float
    tokens: int
    learned_tokens: int
    out_of_route: float | None


@dataclass(frozen=True)
class MicrobatchStats:
    """Statistics of a microbatch, (T) and without gradient; `base_T` is empty when not computed.

    `routed` counts tokens with the engine's experts, `strayed` those whose experts differ in the trainer.
    """

    new_T: Tensor
    old_T: Tensor
    base_T: Tensor
    loss_T: Tensor
    entropy_T: Tensor
    clipped_T: Tensor
    learned_T: Tensor
    factor_T: Tensor
    capped_T: Tensor
    masked: dict[str, Tensor]
    strayed: int
    routed: int


def measure(seen: Sequence[MicrobatchStats], sampled: bool) -> BatchMetrics:
    """Return the metrics of all microbatches; `sampled`: `old_T` comes from a sampler."""

    def whole(name: str) -> Tensor:
        return torch.cat([getattr(one, name) for one in seen])

    new_T, base_T = whole("new_T"), whole("base_T")
    routed = sum(one.routed for one in seen)
    gap_T = (new_T - whole("old_T")).clamp(max=LARGEST_GAP)
    base_T = torch.minimum(base_T, new_T + LARGEST_GAP) if len(base_T) else base_T
    ratio_T = gap_T.exp()
    return BatchMetrics(
        loss=whole("loss_T").sum().item(),
        importance_ratio=ratio_T.mean().item() if sampled else None,
        ratio_min=ratio_T.min().item() if sampled else None,
        ratio_max=ratio_T.max().item() if sampled else None,
        kl=kl_to_base(new_T, base_T).mean().item() if len(base_T) else None,
        # The k3 estimator, as for the base; these tokens come from the sampler.
        kl_old=(ratio_T - 1 - gap_T).mean().item() if sampled else None,
        entropy=whole("entropy_T").mean().item(),
        clip_fraction=whole("clipped_T").float().mean().item(),
        masked={
            reason: int(sum(one.masked[reason].sum().item() for one in seen)) for reason in seen[0].masked
        },
        capped=int(whole("capped_T").sum()),
        correction_weight=whole("factor_T").mean().item(),
        tokens=len(new_T),
        learned_tokens=int(whole("learned_T").sum()),
        out_of_route=sum(one.strayed for one in seen) / routed if routed else None,
    )
