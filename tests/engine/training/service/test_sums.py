"""Plain sums over any targets: each loss against PEFT and AdamW, whatever the chunks, refused by name."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.settings.losses import SUMMED
from engine.training.loss.objective import Objective
from engine.training.model.lora import ResidentBase
from engine.training.model.update import Backward, LossCall, forward_backward, loss_sum
from engine.training.service.examples import examples_of
from engine.training.service.protocol import (
    AdamParams,
    Datum,
    EncodedText,
    ForwardBackwardInput,
    ModelInput,
    OptimStep,
    TensorData,
)
from engine.training.service.session import Session
from tests.helpers.summed_reference import logprobs_of, peft_of, written
from tests.helpers.training_sessions import BASE, opening

# Beside two samples of one prompt, which share its states.
INPUTS = ((5, 9, 30, 31, 32, 40), (5, 9, 30, 61, 62), (7,), (11, 12, 13, 14, 15, 16, 17, 18, 19))
PROMPT = 2
CONFIGS = {"ppo": {"clip_low": 0.2, "clip_high": 0.2}, "gspo": {"clip_low": 0.1, "clip_high": 0.1},
           "cispo": {"clip_low": 1.0, "clip_high": 0.3}, "dro": {"beta": 0.05}}  # fmt: skip
ADAM = AdamParams(learning_rate=1e-2, eps=1e-12, grad_clip_norm=0)


@pytest.fixture(scope="module")
def base(tiny_base) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=64)


@pytest.fixture
def session(base, tmp_path) -> Session:
    """A session whose B is not zero, so that A learns too."""
    made = Session(tmp_path / "sums", base, BASE, opening())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, factor in made.adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    return made


def columns(loss: str, each: int = 1) -> list[dict[str, list[float]]]:
    """Inputs of every datum: targets that are not the next tokens, real weights, samples a little beside."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for tokens in INPUTS:
        count = len(tokens) * each
        taught = [float(i >= min(PROMPT, len(tokens) - 1)) for i in range(len(tokens)) for _ in range(each)]
        drawn = {
            "target_tokens": torch.randint(5, 300, (count,), generator=generator).float(),
            "weights": torch.randn(count, generator=generator) * torch.tensor(taught),
            "advantages": torch.randn(count, generator=generator) * torch.tensor(taught),
            "logprobs": -5.5 + 0.7 * torch.randn(count, generator=generator),
            "sequence_ratio_mask": torch.tensor(taught),
        }
        read = {"cross_entropy": ("weights",), "gspo": ("logprobs", "advantages", "sequence_ratio_mask")}
        names = ("target_tokens", *read.get(loss, ("logprobs", "advantages")))
        made.append({name: drawn[name].tolist() for name in names})
    return made


def data(given: Sequence[dict[str, list[float]]], inputs: Sequence[Sequence[int]] = INPUTS) -> list[Datum]:
    return [
        Datum(
            # Chunks are joined.
            model_input=ModelInput(chunks=[EncodedText(tokens=[token]) for token in tokens]),
            loss_fn_inputs={name: TensorData(data=values) for name, values in one.items()},
        )
        for tokens, one in zip(inputs, given, strict=True)
    ]


def summed(session: Session, sent: Sequence[Datum], loss: str, config: dict | None = None) -> Backward:
    config = CONFIGS.get(loss, {}) if config is None else config
    given = ForwardBackwardInput(data=list(sent), loss_fn=loss, loss_fn_config=config, reduction="sum")
    call = LossCall(session.adapter, examples_of(given), loss, config, sums=True)
    session.calls += 1
    return forward_backward(session.base, [call])[0]


def taken(session: Session) -> dict[str, Tensor]:
    found = {key: factor.grad.clone() for key, factor in session.adapter.factors.items()}
    session.drop_gradients()
    return found


@pytest.mark.parametrize("loss", SUMMED)
def test_a_step_is_adamw_s_on_peft_s_model(tiny_base, base, session, loss):
    given = columns(loss)
    model, theirs = peft_of(tiny_base, session.adapter.factors, 4, 8.0, ["q_proj", "down_proj"])
    optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    scored = [
        logprobs_of(model, tokens, one["target_tokens"]) for tokens, one in zip(INPUTS, given, strict=True)
    ]
    want = sum(written(loss, p, one) for p, one in zip(scored, given, strict=True))
    want.backward()

    found = summed(session, data(given), loss)
    assert found.metrics.loss == pytest.approx(want.item(), rel=1e-5, abs=1e-5)
    for row, p in zip(found.logprobs, scored, strict=True):
        assert list(row) == pytest.approx(p.tolist(), abs=1e-5)
    ours = {key: factor.grad.clone() for key, factor in session.adapter.factors.items()}
    session.optim_step(OptimStep(request_id="one", session=session.name, fence=0, adam_params=ADAM))
    optimizer.step()
    for key, factor in session.adapter.factors.items():
        gradient = theirs[key].grad
        largest = gradient.abs().max()
        assert largest > 1e-4
        torch.testing.assert_close(ours[key], gradient, atol=1e-5 * float(largest) + 1e-7, rtol=1e-3)
        # Adam's first step is the gradient's sign, which rounding decides where the gradient is nearly 0.
        sure = gradient.abs() > 1e-3 * largest
        assert sure.float().mean() > 0.9
        torch.testing.assert_close(factor[sure], theirs[key][sure], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", SUMMED)
def test_a_sum_is_the_same_in_chunks_of_one(base, session, loss, monkeypatch):
    sent = data(columns(loss))
    whole = summed(session, sent, loss)
    want = taken(session)
    monkeypatch.setattr(base, "microbatch_tokens", 4)
    apart = [summed(session, [one], loss) for one in sent]
    found = taken(session)
    assert sum(one.metrics.loss for one in apart) == pytest.approx(whole.metrics.loss, rel=1e-5)
    assert [one.logprobs[0] for one in apart] == [pytest.approx(row, abs=1e-5) for row in whole.logprobs]
    for key, gradient in want.items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(found[key], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=1e-3)


def test_a_custom_loss_is_a_cross_entropy_with_minus_its_gradient_as_weights(tiny_base, base, session):
    """Negative weights too; a linear custom loss is the built-in cross entropy."""
    given = columns("cross_entropy", each=3)
    sent = data(given)
    first = ForwardBackwardInput(data=sent, loss_fn="cross_entropy", reduction="sum")
    rows = examples_of(first)
    scored = base.score(session.adapter, [one.row for one in rows])
    assert [len(row) for row in scored] == [3 * len(tokens) for tokens in INPUTS]
    told = loss_sum(Objective.of("cross_entropy", {}, sums=True), rows, scored)
    assert told == pytest.approx(summed(session, sent, "cross_entropy").metrics.loss, rel=1e-5)
    session.drop_gradients()

    custom = [{**one, "weights": [-2 * p for p in row]} for one, row in zip(given, scored, strict=True)]
    summed(session, data(custom), "cross_entropy")
    found = taken(session)
    model, theirs = peft_of(tiny_base, session.adapter.factors, 4, 8.0, ["q_proj", "down_proj"])
    sum(
        (logprobs_of(model, tokens, one["target_tokens"]) ** 2).sum()
        for tokens, one in zip(INPUTS, given, strict=True)
    ).backward()
    for key, parameter in theirs.items():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-4 * largest, rtol=1e-3)


def test_bounds_of_each_target_replace_the_settings(session):
    given = columns("ppo")
    plain = summed(session, data(given), "ppo")
    want = taken(session)
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    own = [
        {**one, **{name: [value] * len(one["advantages"]) for name, value in bounds.items()}} for one in given
    ]
    found = summed(session, data(own), "ppo", {})
    assert found.metrics.loss == pytest.approx(plain.metrics.loss, rel=1e-6)
    for key, gradient in taken(session).items():
        torch.testing.assert_close(gradient, want[key], atol=1e-6, rtol=1e-5)
    wide = [{**one, "clip_high_threshold": [9.0] * len(one["advantages"])} for one in own]
    assert summed(session, data(wide), "ppo", {}).metrics.loss != pytest.approx(plain.metrics.loss, rel=1e-3)


def test_a_rate_of_zero_moves_nothing_and_gradients_of_calls_add_up(session):
    sent = data(columns("cross_entropy"))
    before = {key: factor.detach().clone() for key, factor in session.adapter.factors.items()}
    summed(session, sent, "cross_entropy")
    once = {key: factor.grad.clone() for key, factor in session.adapter.factors.items()}
    summed(session, sent, "cross_entropy")
    for key, factor in session.adapter.factors.items():
        torch.testing.assert_close(factor.grad, 2 * once[key])
    still = AdamParams(learning_rate=0.0, eps=1e-12, grad_clip_norm=0)
    session.optim_step(OptimStep(request_id="still", session=session.name, fence=0, adam_params=still))
    for key, factor in session.adapter.factors.items():
        assert torch.equal(factor, before[key])


def altered(loss: str, **changes: list[float] | None) -> list[Datum]:
    """The first datum with other inputs; None leaves one out."""
    one = {**columns(loss)[0], **changes}
    return data([{name: values for name, values in one.items() if values is not None}], INPUTS[:1])


@pytest.mark.parametrize(
    ("loss", "changes", "sentence"),
    [
        ("cross_entropy", {"weights": None}, "lacks weights.*cross_entropy"),
        ("ppo", {"advantages": None}, "lacks advantages.*ppo"),
        ("gspo", {"sequence_ratio_mask": None}, "lacks sequence_ratio_mask.*gspo"),
        ("dro", {"weights": [1.0] * 6}, "has weights.*dro"),
        ("cross_entropy", {"weights": [1.0] * 5}, "6 input tokens.*5 weights"),
        ("cross_entropy", {"target_tokens": [7.0] * 7}, "6 input tokens.*7 target_tokens"),
        ("cross_entropy", {"weights": [float("nan")] * 6}, "weights nan.*position 0"),
        ("ppo", {"logprobs": [-1.0] * 5 + [float("-inf")]}, "logprobs -inf.*position 5"),
        ("cross_entropy", {"target_tokens": [7.5] * 6}, r"target 7\.5.*position 0"),
        ("cross_entropy", {"target_tokens": [1e6] * 6}, "Sample 0.*1000000"),
        ("importance_sampling", {"logprobs": [-9e9] * 6}, r"sample 0\b.*finite"),
    ],
)
def test_data_that_do_not_fit_are_named(session, loss, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        summed(session, altered(loss, **changes), loss)
    assert all(factor.grad is None for factor in session.adapter.factors.values())


@pytest.mark.parametrize(
    ("loss", "config", "sentence"),
    [
        ("stable_reinforce", {}, "no loss 'stable_reinforce'.*cross_entropy"),
        ("dapo", {}, "loss dapo.*sum"),
        ("ppo", {"kl": 0.1}, "setting kl.*sum"),
        ("ppo", {"clip_low_threshold": 0.8}, "no setting clip_low_threshold"),
    ],
)
def test_a_loss_without_a_sum_is_named(session, loss, config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        summed(session, altered("ppo"), loss, config)


def test_data_with_different_inputs_are_named(session):
    ones, others = altered("ppo"), altered("ppo", clip_low_threshold=[0.5] * 6)
    with pytest.raises(ConfigError, match=r"0 and 1.*clip_low_threshold"):
        summed(session, [*ones, *others], "ppo")
    replayed = ForwardBackwardInput(data=ones, loss_fn="ppo", reduction="sum", router_replay=True)
    with pytest.raises(ConfigError, match="router_replay"):
        examples_of(replayed)
    shaped = TensorData(data=[1.0] * 6, shape=[3, 2])
    one = ones[0].model_copy(update={"loss_fn_inputs": {**ones[0].loss_fn_inputs, "advantages": shaped}})
    with pytest.raises(ConfigError, match=r"6 advantages.*\[3, 2\]"):
        summed(session, [one], "ppo")
