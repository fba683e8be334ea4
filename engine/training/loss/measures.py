"""Metrics of a batch: loss, importance ratios, divergences, entropy, masks.

Shape suffixes: _T completion tokens, one example after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.loss.grpo import kl_to_base

# Ratios are capped at e^60: JSON has no infinity.
LARGEST_GAP = 60.0


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
