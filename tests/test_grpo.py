"""GRPO's pure functions against a group computed by hand, and their limits."""

import math

import pytest
import torch

from engine.training.grpo import (
    CLIP,
    group_advantages,
    groups_that_teach,
    grpo_loss,
    importance_ratio,
    importance_sampling_loss,
)


def test_advantages_of_a_group_by_hand():
    """Rewards 1, 0, 0, 0: mean 1/4, spread sqrt(3)/4, so sqrt(3) and -1/sqrt(3)."""
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.0)[0]
    want = torch.tensor([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    torch.testing.assert_close(found, want)


def test_a_group_that_agrees_teaches_nothing():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    assert groups_that_teach(rewards).tolist() == [False, False, True]
    assert torch.equal(group_advantages(rewards)[:2], torch.zeros(2, 2))


def test_the_loss_of_a_2x2_group_by_hand():
    """Ratios 1.5, 0.9 with advantage 1 and 0.5, 1.1 with advantage -1; clipped at [0.8, 1.28]."""
    ratio = torch.tensor([1.5, 0.9, 0.5, 1.1])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    # min(1.5, 1.28) + min(0.9, 0.9) + min(-0.5, -0.8) + min(-1.1, -1.1)
    want = -(1.28 + 0.9 - 0.8 - 1.1)
    assert grpo_loss(old + ratio.log(), old, advantage, {}).item() == pytest.approx(want, abs=1e-6)
    unclipped = -(1.5 + 0.9 - 0.5 - 1.1)
    assert importance_sampling_loss(old + ratio.log(), old, advantage, {}).item() == pytest.approx(unclipped)


def test_gradients_stop_where_the_ratio_is_clipped():
    old = torch.zeros(4)
    new = torch.log(torch.tensor([1.5, 1.1, 0.5, 0.9])).requires_grad_()
    grpo_loss(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), {}).backward()
    assert new.grad is not None
    # d(ratio * advantage)/d(new) is ratio * advantage; zero where the bound is the smaller one.
    torch.testing.assert_close(new.grad, torch.tensor([0.0, -1.1, 0.0, 0.9]))


def test_on_policy_the_gradient_is_the_policy_gradient():
    """At ratio 1 every loss has the gradient of -advantage * logprob."""
    advantage = torch.tensor([0.3, -2.0, 1.0])
    for loss in (grpo_loss, importance_sampling_loss):
        new = torch.tensor([-1.0, -0.1, -4.0]).requires_grad_()
        loss(new, new.detach().clone(), advantage, CLIP).backward()
        torch.testing.assert_close(new.grad, -advantage)


def test_importance_ratio_is_one_where_both_agree():
    old = torch.tensor([-1.0, -2.0])
    assert importance_ratio(old, old) == 1.0
    assert importance_ratio(old + math.log(1.2), old) == pytest.approx(1.2)
