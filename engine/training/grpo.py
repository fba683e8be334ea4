"""GRPO as pure functions: advantages, which groups teach, and the loss.

Shape suffixes: _P problems, _G samples of one problem, _T completion tokens of a batch, one after another.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def group_advantages(rewards_PG: Tensor, eps: float = 1e-6) -> Tensor:
    """Return each sample's reward against its own group, in units of the group's spread, as (P, G).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.
    """
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return centred_PG / (rewards_PG.std(dim=1, keepdim=True, correction=0) + eps)


def groups_that_teach(rewards_PG: Tensor) -> Tensor:
    """Return a mask (P,) of the groups whose samples differ in reward; the others have no gradient.

    Dynamic sampling of DAPO (arXiv 2503.14476), section 3.2, without sampling again.
    """
    return rewards_PG.amax(dim=1) > rewards_PG.amin(dim=1)


def grpo_loss(new_T: Tensor, old_T: Tensor, advantage_T: Tensor, config: Mapping[str, float]) -> Tensor:
    """Return the summed clipped surrogate of log-probabilities under the trainer and the sampler.

    PPO's objective (arXiv 1707.06347, equation 7) with DAPO's higher upper bound (arXiv 2503.14476,
    section 3.1). The sum is divided by the tokens of the whole batch, not of each answer (section 3.3).
    """
    ratio_T = torch.exp(new_T - old_T)
    low, high = {**CLIP, **config}["clip_low"], {**CLIP, **config}["clip_high"]
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T).sum()


def importance_sampling_loss(
    new_T: Tensor, old_T: Tensor, advantage_T: Tensor, config: Mapping[str, float]
) -> Tensor:
    """Return the summed policy-gradient surrogate, corrected for the sampler and not clipped."""
    return -(torch.exp(new_T - old_T) * advantage_T).sum()


def importance_ratio(new_T: Tensor, old_T: Tensor) -> float:
    """Return the mean of trainer over sampler probability; 1 on fresh tokens when both agree."""
    return float(torch.exp(new_T - old_T).mean())


Loss = Callable[[Tensor, Tensor, Tensor, Mapping[str, float]], Tensor]
LOSSES: dict[str, Loss] = {"grpo": grpo_loss, "importance_sampling": importance_sampling_loss}
