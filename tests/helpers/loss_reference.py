"""Every loss written out from its paper: loops over answers and tokens, plain numbers, no code of ours."""

import torch
from torch import Tensor

CLIP = {
    "ppo": (0.2, 0.2),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "cispo": (1.0, 4.0),
}
BUDGET = 7


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
    return min(ratio * advantage, bounded * advantage)


def per_token(loss: str, new: Tensor, old: float, advantage: float) -> Tensor:
    ratio = (new - old).exp()
    if loss == "cross_entropy":
        return -new
    if loss == "importance_sampling":
        return -ratio * advantage
    if loss == "dro":
        return -(advantage * new - 0.05 / 2 * (new - old) ** 2)
    low, high = CLIP[loss]
    if loss == "cispo":
        return -min(max(ratio.item(), 1 - low), 1 + high) * advantage * new
    return -clipped(ratio, advantage, low, high)


def reference(
    loss: str, new: list[Tensor], old: list, advantages: list, base: list, kl: float = 0.0
) -> Tensor:
    """The loss of a batch of answers, each given by its tokens' values."""
    if loss == "dpo":
        pairs = []
        for chosen, rejected in zip(range(0, len(new), 2), range(1, len(new), 2), strict=True):
            won = sum(n - b for n, b in zip(new[chosen], base[chosen], strict=True))
            lost = sum(n - b for n, b in zip(new[rejected], base[rejected], strict=True))
            pairs.append(-torch.log(1 / (1 + torch.exp(-0.1 * (won - lost)))))
        return sum(pairs) / len(pairs)
    answers = []
    for tokens in zip(new, old, advantages, base, strict=True):
        terms = []
        length = len(tokens[0])
        gaps = [n - o for n, o in zip(tokens[0], tokens[1], strict=True)]
        for n, o, a, b in zip(*tokens, strict=True):
            if loss == "gspo":
                term = -clipped((sum(gaps) / length).exp(), a, 3e-4, 4e-4)
            else:
                term = per_token(loss, n, o, a)
            terms.append(term + kl * ((b - n).exp() - (b - n) - 1) if kl else term)
        answers.append(terms)
    if loss in ("grpo", "gspo"):
        return sum(sum(terms) / len(terms) for terms in answers) / len(answers)
    if loss == "dr_grpo":
        return sum(sum(terms) for terms in answers) / BUDGET / len(answers)
    return sum(sum(terms) for terms in answers) / sum(len(terms) for terms in answers)
