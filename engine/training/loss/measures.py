"""What a batch showed of loss, ratios, entropy and masks. Knows no model.

Shape suffixes: _T completion tokens, one example after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.loss.grpo import kl_to_base

# A ratio of e^60 says enough; JSON has no infinity.
LARGEST_GAP = 60.0


@dataclass(frozen=True)
class BatchMetrics:
    """Numbers of a batch; means are over its completion tokens, entropies and divergences in nats.

    Ratios are trainer over sampler, `kl_old` the divergence between both, None where there are no samples;
    `kl` is the divergence to the base, None where nobody asked. `masked` has tokens by the reason why they
    taught nothing, `capped` tokens whose weight was cut, `correction_weight` the mean of what corrections
    multiplied with; `learned_tokens` had a gradient. `out_of_route` is the share of tokens whose experts the
    trainer would have chosen otherwise than the engine, None where the engine's were not given.
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
    """What a microbatch left behind, (T) and without gradient; `base_T` is empty where nobody asked.

    `strayed` of the `routed` tokens, which came with the engine's experts, would have taken others.
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
    """Return the metrics of all microbatches together; `sampled`: their `old_T` are a sampler's."""

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
        # k3 as to the base; these tokens were drawn by the sampler.
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
