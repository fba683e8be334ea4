"""Corrections for samples that another program or an older revision drew: weights and masks by token.

All use rho, the trainer's probability of a token over the sampler's, without gradient. A loss's own ratio
already contains rho, since it compares the trainer with the sampler too. Therefore

- masks (outlier, geometric) remove tokens and leave the loss as it is;
- weights (tis, icepop) multiply a token's term by rho, and the loss's own ratio is then taken against the
  trainer itself, not the sampler: otherwise rho would count twice. This is decoupled PPO (arXiv 2110.00641;
  AReaL, arXiv 2505.24298) with the current trainer as the proximal policy. That ratio has the value 1, so the
  loss's clip does not bind; the cap or the band bounds the step instead.

A masked token has no gradient, not even through the KL term. It still counts in the loss's divisor: the mean
is over all sampled tokens, as in IcePop's paper, and does not depend on the packing.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.settings.losses import Band, LossConfig
from engine.training.loss.grpo import Tokens

CAP = 2.0
GEOMETRIC: Band = (0.99, 1.01)
ICEPOP: Band = (0.5, 2.0)
OUTLIER: Band = (1e-4, 100.0)
Bound = TypeVar("Bound", float, Band)


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


def uncorrected(tokens: Tokens) -> Corrected:
    """Return the tokens unchanged, for a loss without samples."""
    none_T = torch.zeros_like(tokens.old_T, dtype=torch.bool)
    return Corrected(tokens, torch.ones_like(tokens.old_T), {}, none_T)


def correct(tokens: Tokens, config: LossConfig) -> Corrected:
    """Return the tokens with the enabled corrections.

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
    found: dict[str, Tensor] = {}
    if config.outlier:
        far_T = outside(gap_T, bound(config.outlier, OUTLIER))
        found["outlier"] = tokens.means(far_T.float()) > 0
    if config.geometric:
        found["geometric"] = outside(tokens.means(gap_T), bound(config.geometric, GEOMETRIC))
    if config.icepop:
        found["icepop"] = outside(gap_T, bound(config.icepop, ICEPOP))
    before_T = torch.zeros_like(gap_T, dtype=torch.bool)
    for reason, mask_T in found.items():
        found[reason], before_T = mask_T & ~before_T, before_T | mask_T
    return found


def outside(gap_T: Tensor, band: Band) -> Tensor:
    """Return a mask (T) of the ratios outside a band, given their logarithms."""
    ratio_T = torch.exp(gap_T)
    return (ratio_T < band[0]) | (ratio_T > band[1])


def bound(given: Bound | bool, vetted: Bound) -> Bound:
    """Return a correction's given bound, or the default when it is only enabled."""
    return vetted if isinstance(given, bool) else given
