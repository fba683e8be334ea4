"""Off-policy corrections on three answers computed by hand, and how they meet the loss's own ratio."""

import pytest
import torch

from engine.settings.losses import LossConfig
from engine.training.loss.grpo import Tokens
from engine.training.loss.objective import Objective, correct

# Trainer over sampler. Geometric means: 1.0; sqrt(1.02) = 1.00995 for the two of them; 4 tokens: below.
RHO = torch.tensor([3.0, 1 / 3, 1.02, 1.0, 200.0, 1.0, 0.45, 2.05])
LENGTHS = (2, 2, 4)


def tokens(rho=RHO, lengths=LENGTHS, advantage: float = 1.0) -> Tokens:
    numbers = [i for i, length in enumerate(lengths) for _ in range(length)]
    old = -torch.arange(1.0, len(rho) + 1) / 4
    return Tokens(
        new_T=(old + rho.log()).requires_grad_(),
        old_T=old,
        advantage_T=torch.full((len(rho),), advantage),
        sequence_T=torch.tensor(numbers),
        sequences=len(lengths),
        weight_T=torch.full((len(rho),), 1 / len(rho)),
    )


def factors(**config) -> tuple[list[float], dict[str, list[int]], list[int]]:
    found = correct(tokens(), LossConfig(**config))
    masked = {reason: mask.int().tolist() for reason, mask in found.masked.items()}
    return [round(value, 4) for value in found.factor_T.tolist()], masked, found.capped_T.int().tolist()


def test_without_corrections_nothing_changes():
    given = tokens()
    found = correct(given, LossConfig())
    assert torch.equal(found.tokens.old_T, given.old_T)
    assert (found.factor_T.tolist(), found.masked, found.capped_T.any().item()) == ([1.0] * 8, {}, False)


def test_truncated_weights_by_hand():
    """rho up to 2; the three beyond are counted."""
    factor, masked, capped = factors(tis=True)
    assert factor == [2.0, 0.3333, 1.02, 1.0, 2.0, 1.0, 0.45, 2.0]
    assert (masked, capped) == ({}, [1, 0, 0, 0, 1, 0, 0, 1])
    assert factors(tis=2.9)[0][:2] == [2.9, 0.3333]


def test_the_geometric_mask_by_hand():
    """Means 1; 1.00995, just inside; (200 * 0.45 * 2.05)^(1/4) = 3.7, far outside: all of its tokens."""
    assert factors(geometric=True) == ([1.0] * 4 + [0.0] * 4, {"geometric": [0] * 4 + [1] * 4}, [0] * 8)
    assert factors(geometric=(0.999, 1.001))[0] == [1.0, 1.0] + [0.0] * 6
    assert factors(geometric=(0.5, 4.0))[0] == [1.0] * 8


def test_icepop_by_hand():
    """rho within [0.5, 2], nothing outside: 3, 1/3, 200, 0.45 and 2.05 are out, token by token."""
    factor, masked, _ = factors(icepop=True)
    assert factor == [0.0, 0.0, 1.02, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert masked == {"icepop": [1, 1, 0, 0, 1, 0, 1, 1]}


def test_the_outlier_mask_by_hand():
    """One token at 200, over 100, takes its whole answer out."""
    assert factors(outlier=True) == ([1.0] * 4 + [0.0] * 4, {"outlier": [0] * 4 + [1] * 4}, [0] * 8)
    assert factors(outlier=(0.4, 250.0))[1] == {"outlier": [1, 1, 0, 0, 0, 0, 0, 0]}


def test_together_a_token_counts_once_for_the_first_reason():
    factor, masked, capped = factors(outlier=True, geometric=(0.999, 1.001), icepop=True, tis=True)
    assert masked == {
        "outlier": [0, 0, 0, 0, 1, 1, 1, 1],
        "geometric": [0, 0, 1, 1, 0, 0, 0, 0],
        "icepop": [1, 1, 0, 0, 0, 0, 0, 0],
    }
    assert (factor, capped) == ([0.0] * 8, [0] * 8)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize(("config", "weight"), [({"tis": 1e6}, RHO), ({"tis": True}, RHO.clamp(max=2.0))])
def test_the_ratio_counts_once(loss, config, weight):
    """Weighted, every loss has the gradient of -rho * advantage * log-probability: not rho squared."""
    given = tokens(advantage=-1.0)
    loss_T, clipped_T, _ = Objective.of(loss, config).terms(given)
    (gradient,) = torch.autograd.grad(loss_T.sum(), given.new_T)
    torch.testing.assert_close(gradient, weight / 8)
    assert not clipped_T.any()


def test_masks_leave_the_rest_of_the_loss_alone():
    """Only whole answers are masked, and what is left has the loss's own clipped terms."""
    plain, masked = tokens(), tokens()
    wanted, *_ = Objective.of("dapo", {}).terms(plain)
    found, *_ = Objective.of("dapo", {"outlier": True}).terms(masked)
    torch.testing.assert_close(found[:4], wanted[:4])
    assert found[4:].tolist() == [0.0] * 4


@pytest.mark.parametrize("config", [{"outlier": True}, {"icepop": True}, {"geometric": True}])
def test_a_masked_token_beyond_all_numbers_leaves_no_trace(config):
    """e^200 is infinite in float32; masked it must not become infinity times zero."""
    given = tokens(torch.ones(4), (2, 2))
    given.old_T[1] -= 200.0
    loss_T, _, corrected = Objective.of("dapo", config | {"kl": 0.1}).terms(
        Tokens(**{**vars(given), "base_T": given.new_T.detach() + 0.1})
    )
    (gradient,) = torch.autograd.grad(loss_T.sum(), given.new_T)
    assert loss_T.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1] == 0
    assert (gradient[2:] != 0).all()
    assert sum(mask.sum() for mask in corrected.masked.values()) > 0
