"""A second route to a training step on sums: PEFT's adapter, and each loss from the protocol's table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def peft_of(
    path: Path, factors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]
) -> tuple[Any, dict[str, Tensor]]:
    """Return a PEFT model with an adapter of these factors, and its parameters by their keys."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    made = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))).eval()
    names = dict(made.named_parameters())
    found = {}
    for key, factor in factors.items():
        found[key] = names[f"base_model.model.{key}.default.weight"]
        found[key].data.copy_(factor.detach())
    return made, found


def logprobs_of(model: Any, tokens: Sequence[int], targets: Sequence[float]) -> Tensor:
    """Return the log-probability of each target, those of a token beside each other."""
    logits = model(torch.tensor([tokens])).logits[0].float()
    each = len(targets) // len(tokens)
    wanted = torch.tensor(targets).long().view(len(tokens), each)
    return logits.log_softmax(-1).gather(1, wanted).flatten()


def written(loss: str, p: Tensor, one: dict[str, list[float]]) -> Tensor:
    """The loss of a datum from the protocol's table, target after target."""
    if loss == "cross_entropy":
        return sum(-w * x for w, x in zip(one["weights"], p, strict=True))
    gaps = [x - q for x, q in zip(p, one["logprobs"], strict=True)]
    if loss == "gspo":
        masked = [g.detach() for g, m in zip(gaps, one["sequence_ratio_mask"], strict=True) if m]
        s = (sum(masked) / len(masked)).exp()
    terms = []
    for x, gap, a in zip(p, gaps, one["advantages"], strict=True):
        r = gap.exp() if loss != "gspo" else s * (x - x.detach()).exp()
        if loss == "importance_sampling":
            terms.append(-r * a)
        elif loss == "dro":
            terms.append(-(a * x - 0.05 / 2 * gap**2))
        elif loss == "cispo":
            terms.append(-min(r.item(), 1.3) * a * x)
        else:
            low, high = (0.8, 1.2) if loss == "ppo" else (0.9, 1.1)
            terms.append(-min(r * a, min(max(r, torch.tensor(low)), torch.tensor(high)) * a))
    return sum(terms)
