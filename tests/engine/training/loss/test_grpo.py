"""The losses on groups computed by hand, group advantages, and their limits."""

import math
import sys
from collections import Counter

import pytest
import torch

from engine.errors import ConfigError
from engine.settings.losses import LOSS_SETTINGS, LossConfig
from engine.settings.policies import PolicyConfig
from engine.training.loss.grpo import (
    LOSSES,
    Tokens,
    kl_to_base,
    loss_of,
)
from engine.training.loss.objective import Objective
from engine.training.rollout_data import Drawn, Judged, Sampler, teaches
from engine.training.sample_groups import Sample
from tests.helpers.taken_step import take_step

# A group of two answers of two tokens each. Ratios trainer/sampler 1.5, 0.9 and 0.5, 1.1; advantages 1, -1.
RATIO = torch.tensor([1.5, 0.9, 0.5, 1.1])
OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0])
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, -1.0])


def group(lengths=(2, 2), loss: str = "dapo", ratio=RATIO, old=OLD, advantage=ADVANTAGE, **config) -> Tokens:
    """Tokens of a whole batch, with the shares that the loss gives them."""
    shares = Objective.of(loss, config).shares(lengths)
    numbers = [i for i, length in enumerate(lengths) for _ in range(length)]
    return Tokens(
        new_T=(old + ratio.log()).requires_grad_(),
        old_T=old,
        advantage_T=advantage,
        sequence_T=torch.tensor(numbers),
        sequences=len(lengths),
        weight_T=torch.tensor([shares[i] for i in numbers]),
    )


def value(loss: str, tokens: Tokens, **config) -> torch.Tensor:
    return Objective.of(loss, config).terms(tokens)[0].sum()


def advantages(rewards: list[list[float]], loss: str = "grpo") -> list[list[float]]:
    """The advantages that a step sends for groups with these rewards."""
    answer, size = Sample((4, 5), (-1.0, -2.0), "x", False), len(rewards[0])
    drawn = Drawn(Sampler(0, None), (), ((1, 2),) * len(rewards), ((answer,) * size,) * len(rewards), 0, 0.0)
    config = PolicyConfig(task="addition", suite="s", group_size=size).model_copy(update={"loss": loss})
    data, _ = take_step(drawn, Judged(rewards, Counter()), config)
    found = [datum.loss_fn_inputs["advantages"].data[-1] for datum in data]
    return [found[begin : begin + size] for begin in range(0, len(found), size)]


def test_advantages_of_a_group_by_hand():
    """Rewards 1, 0, 0, 0: mean 1/4, spread sqrt(3)/4, so sqrt(3) and -1/sqrt(3); Dr. GRPO: 3/4 and -1/4."""
    rewards = [[1.0, 0.0, 0.0, 0.0]]
    assert advantages(rewards)[0] == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=1e-5)
    assert advantages(rewards, "dr_grpo")[0] == [0.75, -0.25, -0.25, -0.25]
    assert [name for name, loss in LOSSES.items() if not loss.by_spread] == ["dr_grpo"]


def test_a_group_that_agrees_teaches_nothing():
    rewards = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    assert Judged(rewards, Counter()).teaching == [False, False, True]
    assert advantages(rewards)[:2] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 10, 12, 16, 31])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo"])
def test_equal_rewards_give_exact_zeros(size: int, loss: str):
    """The float32 mean of equal numbers is not the number; Adam makes a whole step of the difference."""
    rewards = [[tenth / 10] * size for tenth in range(11)]
    rounded = [[0.1 + 0.2, *[0.3] * (size - 1)], [1 / 3] * size]
    found = advantages([*rewards, *rounded, [1.0, *[0.0] * (size - 1)]], loss)
    assert found[:-1] == [[0.0] * size] * 13
    assert all(found[-1])


@pytest.mark.parametrize("loss", [name for name, rule in LOSSES.items() if rule.sampled])
@pytest.mark.parametrize("size", [3, 7, 12])
def test_where_all_groups_agree_no_loss_moves_the_adapter(loss: str, size: int):
    """However far the trainer is from the sampler. The penalty of DRO has a gradient then: it is not used."""
    answer = Sample((4, 5), (-1.0, -2.0), "x", False)
    config = PolicyConfig(task="addition", suite="s", group_size=size).model_copy(update={"loss": loss})
    for tenth in range(1, 10):
        drawn = Drawn(Sampler(0, None), (), ((1, 2),), ((answer,) * size,), 0, 0.0)
        judged = Judged([[tenth / 10] * size], Counter())
        data, row = take_step(drawn, judged, config)
        given = [datum.loss_fn_inputs["advantages"].data[-2:] for datum in data]
        assert (row["groups_kept"], given, row["zero_spread"]) == (0, [[0.0, 0.0]] * size, 1)
    settings = {"budget": 2} if loss == "dr_grpo" else {}
    tokens = group(loss=loss, advantage=torch.tensor([*given[0], *given[1]]), **settings)
    value(loss, tokens, **settings).backward()
    learned = int(tokens.new_T.grad.count_nonzero())
    assert learned == (4 if loss == "dro" else 0)
    assert not teaches(judged, config, learned)
    # A KL term and a custom loss ask for the step, but not for one without a gradient or a sound group.
    pulled = config.model_copy(update={"loss_config": LossConfig(kl=0.1)})
    for asking in (pulled, config.model_copy(update={"loss": "python:mine:squares"})):
        assert teaches(judged, asking, 4)
        assert not teaches(judged, asking, 0)
        assert not teaches(Judged([None], Counter()), asking, 4)
    assert teaches(Judged([[0.0] * size, [1.0] + [0.0] * (size - 1)], Counter()), config, 4)


def test_dapo_by_hand():
    """Clipped to [0.8, 1.28]: 1.28, 0.9 | -0.8, -1.1; a mean over 4 tokens."""
    tokens = group()
    found = value("dapo", tokens)
    assert found.item() == pytest.approx(-(1.28 + 0.9 - 0.8 - 1.1) / 4, abs=1e-6)
    found.backward()
    # d(ratio * advantage)/d(log-probability) is ratio * advantage; nothing where the bound was taken.
    torch.testing.assert_close(tokens.new_T.grad, torch.tensor([0.0, -0.9, 0.0, 1.1]) / 4)


def test_grpo_by_hand():
    """Clipped to [0.8, 1.2]: 1.2, 0.9 | -0.8, -1.1; each answer's mean, then the mean of both."""
    assert value("grpo", group(loss="grpo")).item() == pytest.approx(-(2.1 / 2 - 1.9 / 2) / 2, abs=1e-6)
    # Lengths 3 and 1: (1.2 + 0.9 - 0.8) / 3 and -1.1; DAPO weighs all four tokens alike.
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    uneven = group((3, 1), "grpo", advantage=advantage)
    assert value("grpo", uneven).item() == pytest.approx(-(1.3 / 3 - 1.1) / 2, abs=1e-6)
    # Dr. GRPO: sums over answers, by a budget of 10 tokens.
    fixed = group((3, 1), "dr_grpo", budget=10)
    assert value("dr_grpo", fixed, budget=10).item() == pytest.approx(-(1.3 - 1.1) / 10 / 2, abs=1e-6)


def test_gspo_by_hand():
    """Ratios of sequences: sqrt(1.5 * 0.9) = 1.1619, sqrt(0.5 * 1.1) = 0.7416; clipped to [0.8, 1.1]."""
    tokens = group(loss="gspo")
    found = value("gspo", tokens, clip_low=0.2, clip_high=0.1)
    assert found.item() == pytest.approx(-(1.1 - 0.8) / 2, abs=1e-6)
    found.backward()
    assert tokens.new_T.grad.tolist() == [0.0] * 4
    # Not clipped, all tokens of a sequence have its ratio as gradient, by their number.
    tokens = group(loss="gspo")
    found = value("gspo", tokens, clip_low=0.5, clip_high=0.5)
    assert found.item() == pytest.approx(-(1.161895 - 0.741620) / 2, abs=1e-6)
    found.backward()
    want = torch.tensor([-1.161895, -1.161895, 0.741620, 0.741620]) / 4
    torch.testing.assert_close(tokens.new_T.grad, want, atol=1e-6, rtol=0)


def test_cispo_by_hand():
    """Weights 1.28, 0.9, 0.5, 1.1: clipped above only. A clipped token still has a gradient: its weight's."""
    tokens = group()
    found = value("cispo", tokens, clip_high=0.28)
    new = [-1 + math.log(1.5), -2 + math.log(0.9), -0.5 + math.log(0.5), -3 + math.log(1.1)]
    want = -(1.28 * new[0] + 0.9 * new[1] - 0.5 * new[2] - 1.1 * new[3]) / 4
    assert found.item() == pytest.approx(want, abs=1e-6)
    found.backward()
    torch.testing.assert_close(tokens.new_T.grad, torch.tensor([-1.28, -0.9, 0.5, 1.1]) / 4)
    clipped = Objective.of("cispo", {"clip_high": 0.28}).terms(tokens)[1]
    assert clipped.tolist() == [True, False, False, False]


def test_importance_sampling_by_hand():
    want = -(1.5 + 0.9 - 0.5 - 1.1) / 4
    assert value("importance_sampling", group()).item() == pytest.approx(want, abs=1e-6)


def test_the_clip_counts_the_tokens_that_it_holds_back():
    """1.5 with advantage 1 and 0.5 with advantage -1; 1.5 with -1 and 0.5 with 1 go on."""
    objective = Objective.of("dapo", {})
    assert objective.terms(group())[1].tolist() == [True, False, True, False]
    assert objective.terms(group(advantage=-ADVANTAGE))[1].tolist() == [False] * 4


@pytest.mark.parametrize("loss", [name for name in LOSSES if LOSSES[name].sampled])
def test_at_ratio_one_every_loss_has_the_policy_gradient(loss):
    """The gradient of -advantage * log-probability, by each token's share."""
    advantage = torch.tensor([0.3, 0.3, 0.3, -2.0, -2.0])
    old = torch.tensor([-1.0, -0.1, -4.0, -2.0, -0.3])
    tokens = group((3, 2), loss, torch.ones(5), old, advantage)
    value(loss, tokens).backward()
    torch.testing.assert_close(tokens.new_T.grad, -advantage * tokens.weight_T)


def test_kl_to_the_base_by_hand():
    """Base over trainer 2: 2 - ln 2 - 1; its gradient is 1 - 2. Zero, and flat, where both agree."""
    new = torch.tensor([-2.0, -1.0]).requires_grad_()
    base = torch.tensor([-2.0 + math.log(2), -1.0])
    found = kl_to_base(new, base)
    torch.testing.assert_close(found.detach(), torch.tensor([1 - math.log(2), 0.0]))
    found.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([-1.0, 0.0]))


def test_the_estimate_of_the_kl_is_the_divergence():
    """Over all tokens of a small vocabulary, weighted by the policy, it is exactly the KL divergence."""
    generator = torch.Generator().manual_seed(1)
    new, base = torch.randn(2, 50, generator=generator).log_softmax(-1)
    estimate = (new.exp() * kl_to_base(new, base)).sum()
    torch.testing.assert_close(estimate, (new.exp() * (new - base)).sum())
    assert estimate > 0.1


def test_a_loss_of_ones_own_is_found_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def squares(tokens, settings):\n    return settings['by'] * tokens.new_T**2\n"
        "def number(tokens, settings):\n    return 1.0\n"
        "spread = 2.0\n"
    )
    (tmp_path / "broken.py").write_text("def loss(tokens, settings:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tokens = group()
    found = value("python:mine:squares", tokens, options={"by": 3.0})
    assert found.item() == pytest.approx(3 * (tokens.new_T**2).mean().item())
    with pytest.raises(ConfigError, match="tensor"):
        value("python:mine:number", tokens)
    for path in ("python:mine:cubes", "python:nowhere:cubes", "python:broken:loss"):
        with pytest.raises(ConfigError, match=f"'{path}'.*loaded"):
            loss_of(path)
    with pytest.raises(ConfigError, match=r"'python:mine:spread'.*function"):
        loss_of("python:mine:spread")


def test_every_loss_has_its_settings():
    assert LOSSES.keys() == LOSS_SETTINGS.keys()
