"""Every loss and its gradient against one written out from its paper, and what its settings may be."""

from collections import Counter

import pytest
import torch

from engine.errors import ConfigError
from engine.settings.forms import AdaptForm
from engine.settings.losses import LossConfig, loss_config
from engine.settings.policies import PolicyConfig
from engine.training.loss.grpo import LOSSES, Tokens
from engine.training.loss.objective import Objective
from engine.training.rollout_data import Drawn, Judged, Sampler
from engine.training.sample_groups import Sample
from tests.helpers.loss_reference import BUDGET, reference
from tests.helpers.taken_step import take_step

LENGTHS = (4, 1, 3, 6, 2, 5)
SAMPLED = [name for name, loss in LOSSES.items() if loss.sampled]


def settings(loss: str) -> dict:
    return {"budget": BUDGET} if loss == "dr_grpo" else {}


def batch(loss: str, spread: float, **config) -> Tokens:
    """Six answers whose log-probabilities differ from the sampler's by about `spread`."""
    generator = torch.Generator().manual_seed(len(loss))
    total = sum(LENGTHS)
    old = -3 * torch.rand(total, generator=generator)
    shares = Objective.of(loss, settings(loss) | config).shares(LENGTHS)
    numbers = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    worth = torch.randn(len(LENGTHS), generator=generator)
    return Tokens(
        new_T=(old + spread * torch.randn(total, generator=generator)).requires_grad_(),
        old_T=old,
        advantage_T=worth[numbers],
        sequence_T=torch.tensor(numbers),
        sequences=len(LENGTHS),
        weight_T=torch.tensor([shares[i] for i in numbers]),
        base_T=old + 0.3 * torch.randn(total, generator=generator),
    )


def both(loss: str, spread: float, **config) -> tuple[torch.Tensor, ...]:
    """Our loss and its gradient, and the reference's."""
    tokens = batch(loss, spread, **config)
    ours = Objective.of(loss, settings(loss) | config).terms(tokens)[0].sum()
    (gradient,) = torch.autograd.grad(ours, tokens.new_T)
    new = [list(part) for part in tokens.new_T.split(LENGTHS)]
    rest = [
        [part.tolist() for part in values.split(LENGTHS)] for values in (tokens.old_T, tokens.advantage_T)
    ]
    base = [list(part) for part in tokens.base_T.split(LENGTHS)]
    theirs = reference(loss, new, *rest, base, **config)
    (want,) = torch.autograd.grad(theirs, tokens.new_T)
    return ours.detach(), gradient, theirs.detach(), want


@pytest.mark.parametrize("spread", [0.0002, 0.5, 2.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_are_the_paper_s(loss, spread):
    ours, gradient, theirs, want = both(loss, spread)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, want, atol=1e-7, rtol=1e-5)
    # It would notice another sign, and is not all zeros; far from the sampler GSPO clips some sequences only.
    assert want.abs().max() > 1e-3
    assert not torch.allclose(-gradient, want, atol=1e-4)


@pytest.mark.parametrize("loss", SAMPLED)
def test_the_kl_to_the_base_joins_every_loss(loss):
    ours, gradient, theirs, want = both(loss, 0.3, kl=0.7)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, want, atol=1e-7, rtol=1e-5)
    without = both(loss, 0.3)[1]
    assert not torch.allclose(gradient, without, atol=1e-3)


def test_the_losses_differ_where_their_papers_do():
    """PPO, GRPO, Dr. GRPO and DAPO share their terms; clip or mean tells them apart."""
    found = {loss: both(loss, 0.5)[1] for loss in LOSSES}
    names = list(found)
    same = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if torch.allclose(found[a], found[b])]
    assert same == []


@pytest.mark.parametrize(
    ("loss", "given", "sentence"),
    [
        ("hope", {}, "no loss 'hope'. Known losses: cross_entropy"),
        ("python:hope", {}, "no loss 'python:hope'"),
        ("dapo", {"clip": 0.2}, "no setting clip."),
        ("dapo", {"beta": 0.2}, "no setting beta"),
        ("dpo", {"tis": True}, "no setting tis"),
        ("cross_entropy", {"kl": 1.0}, "It has: none."),
        (
            "dapo",
            {"clip_low": -0.1},
            "`clip_low`",
        ),
        ("dapo", {"kl": float("nan")}, "`kl`"),
        ("ppo", {"icepop": [1.5, 2.0]}, "icepop"),
        ("ppo", {"tis": 0.5}, "tis"),
        ("gspo", {"clip_high": "wide"}, "clip_high"),
    ],
)
def test_wrong_settings_are_named(loss, given, sentence):
    with pytest.raises(ConfigError) as error:
        loss_config(loss, given)
    assert sentence in str(error.value)


def test_a_policy_carries_its_loss_to_the_trainer():
    plain = PolicyConfig(task="addition", suite="s")
    assert (plain.loss, plain.loss_sent()) == ("dapo", {})
    # What a line of training is named by is as before there were other losses.
    assert plain.model_dump(exclude_defaults=True) == {"task": "addition", "suite": "s"}
    assert PolicyConfig.model_validate(plain.model_dump(mode="json")) == plain
    given = {"kl": 0.1, "tis": True, "icepop": [0.25, 4.0]}
    chosen = PolicyConfig(task="addition", suite="s", loss="gspo", loss_config=given)
    assert chosen.loss_sent() == given
    assert loss_config("gspo", chosen.loss_sent()).sent() == chosen.loss_config.sent()
    assert PolicyConfig(task="a", suite="s", loss="dr_grpo", max_tokens=9).loss_sent() == {"budget": 9}
    assert AdaptForm(policy="sums", loss="gspo").changes() == {"loss": "gspo"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"loss": "dpo"}, "loss"),
        ({"loss": "importance_sampling", "loss_config": {"clip_low": 0.1}}, "setting clip_low"),
        ({"loss_config": {"clip": 0.1}}, "clip"),
        ({"temperature": 0.7}, "temperature"),
    ],
)
def test_a_policy_with_a_loss_that_does_not_fit_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        PolicyConfig(task="addition", suite="s", **given)


def test_what_is_empty_is_the_paper_s():
    assert LossConfig().values("dapo") == {"clip_low": 0.2, "clip_high": 0.28}
    assert LossConfig(clip_high=0.5).values("dapo") == {"clip_low": 0.2, "clip_high": 0.5}
    assert LossConfig(options={"by": 2}).values("python:mine:squares") == {"by": 2}


def test_each_loss_gets_the_groups_and_advantages_of_its_paper():
    """Rewards 1 and 0 have the mean 1/2 and the spread 1/2; the second group agrees."""
    sample = Sample((7, 8), (-1.0, -2.0), "x")
    drawn = Drawn(Sampler(0, None), [], [[5], [6]], [[sample] * 2] * 2, 0, 0.0)
    judged = Judged([(1.0, 0.0), (1.0, 1.0)], Counter())
    for loss, want in {
        "dapo": [1, -1],
        "cispo": [1, -1],
        "grpo": [1, -1, 0, 0],
        "gspo": [1, -1, 0, 0],
        "dr_grpo": [0.5, -0.5, 0, 0],
        # Its penalty would have a gradient in the second group.
        "dro": [1, -1],
    }.items():
        config = PolicyConfig(task="addition", suite="s").model_copy(update={"loss": loss})
        data, row = take_step(drawn, judged, config)
        found = [datum.loss_fn_inputs["advantages"].data[-1] for datum in data]
        assert found == pytest.approx(want, abs=1e-5)
        assert row["groups_kept"] == 1
