"""Gradients over a session's examples: whatever the microbatches, refused in time, and measured."""

import json
import math
import sys
import threading
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from engine.errors import ConfigError
from engine.settings.losses import CORRECTIONS
from engine.training.loss.grpo import LOSSES
from engine.training.loss.objective import MicrobatchStats, measure
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from engine.training.model.update import LossCall, check_rows, forward_backward
from engine.training.service.protocol import AdamParams, CreateSession, OptimStep
from engine.training.service.session import Session
from tests.helpers.loss_reference import BUDGET, reference
from tests.helpers.training_pass import gather, one_pass

TARGETS = ("q_proj", "v_proj", "down_proj")
ROWS = [
    TokenRow((5, 9, 30, 31, 32), 2), TokenRow((7, 8, 40), 1), TokenRow((11, 12, 13, 14, 15, 16, 17), 6),
    TokenRow((5, 9, 33, 34), 2), TokenRow((21, 22, 23, 24, 25, 26), 1), TokenRow((7, 8), 1),
]  # fmt: skip
ADVANTAGES = (1.0, -0.5, 2.0, 0.3, -1.2, -0.8)
SAMPLED = [name for name, loss in LOSSES.items() if loss.sampled]


@pytest.fixture(scope="module")
def base(tiny_base) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=64)


@pytest.fixture(scope="module")
def adapter(base):
    """An adapter whose B is not zero any more."""
    generator = torch.Generator().manual_seed(1)
    adapter = base.new_adapter(4, 8.0, TARGETS, generator)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return adapter


@pytest.fixture(scope="module")
def data(base, adapter) -> list[Example]:
    """Samples of a policy a little beside the adapter's."""
    generator = torch.Generator().manual_seed(2)
    scores = base.score(adapter, ROWS)
    return [
        Example(row, tuple((torch.tensor(old) + 0.2 * torch.randn(len(old), generator=generator)).tolist()),
                (advantage,) * len(old))
        for row, old, advantage in zip(ROWS, scores, ADVANTAGES, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("before", [False, True])
def test_a_batch_without_gradient_costs_no_backward_pass(base, data, monkeypatch, before):
    """Its log-probabilities are measured all the same, and the gradients gathered before stay."""
    trained = base.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(1))
    silent = [replace(example, advantages=(0.0,) * len(example.advantages)) for example in data]
    if before:
        one_pass(base, trained, data, "dapo", {})
    want = {key: factor.grad.clone() for key, factor in trained.factors.items() if before}
    passes: list[object] = []
    backward = torch.Tensor.backward

    def counted(tensor, *args, **kwargs):
        passes.append(tensor)
        return backward(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    found = one_pass(base, trained, silent, "dapo", {})
    assert passes == []
    assert (found.metrics.learned_tokens, found.metrics.loss) == (0, 0.0)
    assert found.metrics.importance_ratio != 1.0
    for key, factor in trained.factors.items():
        assert torch.equal(factor.grad, want[key] if before else torch.zeros_like(factor))
    one_pass(base, trained, data, "dapo", {})
    assert passes


def bare(data: list[Example]) -> list[Example]:
    return [Example(example.row) for example in data]


def given(loss: str, data: list[Example]) -> tuple[list[Example], dict]:
    """Data and settings as a loss wants them."""
    config = {"budget": BUDGET} if loss == "dr_grpo" else {}
    return (data if LOSSES[loss].sampled else bare(data)), config


def gradients(base, adapter, data, loss, config):
    found = one_pass(base, adapter, data, loss, config)
    taken = {key: factor.grad.clone() for key, factor in adapter.factors.items()}
    adapter.clear_gradients()
    return found, taken


def with_budget(base, monkeypatch, tokens: int) -> ResidentBase:
    monkeypatch.setattr(base, "microbatch_tokens", tokens)
    return base


@pytest.mark.parametrize(
    ("loss", "corrected"), [*((loss, False) for loss in LOSSES), *((loss, True) for loss in SAMPLED)]
)
def test_the_gradient_does_not_depend_on_the_microbatches(base, adapter, data, loss, corrected, monkeypatch):
    examples, config = given(loss, data)
    if corrected:
        config |= {"kl": 0.3, "geometric": [0.8, 1.25], **dict.fromkeys(("tis", "icepop", "outlier"), True)}
    sizes, runs = set(), []
    for budget in (1, 9, 18, 64):
        used = with_budget(base, monkeypatch, budget)
        sizes.add(len(used.microbatches(ROWS, LOSSES[loss].unit)))
        runs.append(gradients(used, adapter, examples, loss, config))
    assert len(sizes) >= 3
    assert min(sizes) == 1
    # Another microbatch rounds a log-probability of float32 to a neighbour; a loss weighs it by advantage and
    # ratio, which is below 2 here.
    largest = max(abs(one) for example in data for one in example.old_logprobs)
    rounding = torch.finfo(torch.float32).eps * largest * max(map(abs, ADVANTAGES)) * 2
    for found, taken in runs[1:]:
        assert found.metrics.loss == pytest.approx(runs[0][0].metrics.loss, abs=rounding)
        for key, gradient in taken.items():
            torch.testing.assert_close(gradient, runs[0][1][key], atol=1e-6, rtol=0)
    assert max(gradient.abs().max() for gradient in runs[0][1].values()) > 1e-3


@pytest.mark.parametrize("loss", LOSSES)
def test_the_adapter_s_gradient_is_autograd_s_of_the_paper_s_loss(base, adapter, data, loss, monkeypatch):
    """The second route: one forward for each answer, the reference's loops, and one backward."""
    examples, config = given(loss, data)
    found, ours = gradients(with_budget(base, monkeypatch, 9), adapter, examples, loss, config)
    plain = base.score(None, ROWS)
    with base.using(adapter):
        new = [list(base.logprobs([row])) for row in ROWS]
        columns = [[example.old_logprobs for example in data], [example.advantages for example in data]]
        want = reference(loss, new, *columns, [[torch.tensor(b) for b in row] for row in plain])
        want.backward()
    assert found.metrics.loss == pytest.approx(want.item(), abs=1e-5)
    for key, factor in adapter.factors.items():
        torch.testing.assert_close(ours[key], factor.grad, atol=1e-5, rtol=1e-4)
    adapter.clear_gradients()


def test_calls_add_up(base, adapter, data):
    """Two calls gather the sum of what each would alone."""
    _, one = gradients(base, adapter, data[:4], "dapo", {})
    _, two = gradients(base, adapter, data[4:], "dapo", {})
    one_pass(base, adapter, data[:4], "dapo", {})
    _, both = gradients(base, adapter, data[4:], "dapo", {})
    for key, gradient in both.items():
        torch.testing.assert_close(gradient, one[key] + two[key], atol=1e-7, rtol=1e-6)


def broken(data: list[Example], which: int, **changes) -> list[Example]:
    return [replace(example, **changes) if i == which else example for i, example in enumerate(data)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_changes_nothing(base, data, tmp_path, monkeypatch, value):
    """The sample is named though others ran before it, and the step that follows is as if it never came."""
    opening = CreateSession(
        request_id="a", session="sums-1", policy="sums", rank=4, alpha=8.0, targets=list(TARGETS), seed=3,
        holder="me",
    )  # fmt: skip
    step = OptimStep(request_id="b", session="sums-1", fence=0, adam_params=AdamParams(learning_rate=1e-2))
    kept, other = (Session(tmp_path / name, base, "b" * 64, opening) for name in ("kept", "other"))
    used = with_budget(base, monkeypatch, 9)
    bad = broken(data, 4, advantages=(1.0, value, 1.0, 1.0, 1.0))
    for session in (kept, other):
        gather(session, data[:2])
    before = {key: factor.grad.clone() for key, factor in kept.adapter.factors.items()}
    ran = []
    monkeypatch.setattr(
        used, "using_many", lambda counts, using=used.using_many: ran.append(counts) or using(counts)
    )
    with pytest.raises(ConfigError, match=r"sample 4\b.*finite"):
        gather(kept, bad)
    assert len(ran) > 1
    assert all(torch.equal(before[key], factor.grad) for key, factor in kept.adapter.factors.items())
    for session in (kept, other):
        session.optim_step(step)
    pairs = zip(kept.adapter.factors.values(), other.adapter.factors.values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_gradient_that_is_no_number_is_found_too(base, adapter, data, tmp_path, monkeypatch):
    """The square root has the value 0 and an infinite slope."""
    (tmp_path / "steep.py").write_text(
        "def loss(tokens, settings):\n"
        "    gap_T = tokens.new_T - tokens.new_T.detach()\n"
        "    return (gap_T + settings['far'] * (tokens.sequence_T != 0)).abs().sqrt()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    used = with_budget(base, monkeypatch, 64)
    first = used.microbatches(ROWS)[0][0]
    with pytest.raises(ConfigError, match=rf"sample {first}\b.*finite"):
        one_pass(used, adapter, data, "python:steep:loss", {"options": {"far": 1.0}})
    assert all(factor.grad is None for factor in adapter.factors.values())


HANGING = """
import time, torch

def waits(tokens, settings):
    time.sleep(600)

def spins(tokens, settings):
    while True:
        pass

class Back(torch.autograd.Function):
    @staticmethod
    def forward(context, value_T): return value_T.clone()

    @staticmethod
    def backward(context, gradient_T): time.sleep(600)

def in_its_gradient(tokens, settings):
    return Back.apply(tokens.new_T)
"""


@pytest.mark.parametrize("name", ["waits", "spins", "in_its_gradient", "when_imported"])
def test_a_loss_of_ones_own_that_hangs_is_given_up(base, adapter, data, tmp_path, monkeypatch, name):
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "hanging_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    loss = "python:hanging_import:loss" if name == "when_imported" else f"python:hanging:{name}"
    one_pass(base, adapter, data[:2], "dapo", {})
    before = {key: factor.grad.clone() for key, factor in adapter.factors.items()}
    with pytest.raises(ConfigError, match=f"{loss}.*`timeout_s`"):
        one_pass(base, adapter, data, loss, {"timeout_s": 0.5})
    assert all(torch.equal(before[key], factor.grad) for key, factor in adapter.factors.items())
    adapter.clear_gradients()
    # What would take time from everybody for ever has ended.
    left = [thread for thread in threading.enumerate() if thread.name.endswith("hanging:spins")]
    for thread in left:
        thread.join(20)
    assert not any(thread.is_alive() for thread in left)


def test_a_gradient_that_overflows_in_the_base_is_refused(base, adapter, data):
    """Every term and its slope are finite, their products with the factors are not."""
    one_pass(base, adapter, data[:2], "dapo", {})
    before = {key: factor.grad.clone() for key, factor in adapter.factors.items()}
    huge = broken(data, 0, advantages=(-3e38, 3e38, -3e38))
    with pytest.raises(ConfigError, match=r"gradients.*norm"):
        one_pass(base, adapter, huge[:1], "importance_sampling", {})
    assert all(torch.equal(before[key], factor.grad) for key, factor in adapter.factors.items())
    adapter.clear_gradients()


def of_norm(base, adapter, data: list[Example], norm: float) -> list[Example]:
    """Return a sample whose gradient has this norm."""
    _, taken = gradients(base, adapter, data[:1], "importance_sampling", {})
    scale = norm / torch.nn.utils.get_total_norm(taken.values()).item()
    return broken(data[:1], 0, advantages=tuple(scale * value for value in data[0].advantages))


def test_gradients_of_which_only_the_norm_overflows_are_refused(base, adapter, data):
    """The clip would make nothing of them, and AdamW's second moment would be infinite for ever."""
    with pytest.raises(ConfigError, match=r"gradients.*norm"):
        one_pass(base, adapter, of_norm(base, adapter, data, 1e20), "importance_sampling", {})
    assert all(factor.grad is None for factor in adapter.factors.values())


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_that_overflow_only_together_are_refused(base, adapter, data, shared):
    """Each call's are fine; in a shared pass the other adapter's stay as they were too."""
    other = base.new_adapter(4, 8.0, TARGETS, torch.Generator())
    calls = [
        LossCall(other, data, "importance_sampling", {}),
        LossCall(adapter, of_norm(base, adapter, data, 1.2e19), "importance_sampling", {}),
    ]
    forward_backward(base, calls)
    factors = [factor for call in calls for factor in call.adapter.factors.values()]
    before = [factor.grad.clone() for factor in factors]
    one = calls[1]
    again = partial(one_pass, base, one.adapter, one.data, one.loss, one.config)
    with pytest.raises(ConfigError, match=r"gradients.*norm"):
        forward_backward(base, calls) if shared else again()
    assert all(torch.equal(*pair) for pair in zip(before, [factor.grad for factor in factors], strict=True))
    adapter.clear_gradients()


def test_a_call_that_is_ended_between_microbatches_leaves_the_gradients(base, adapter, data, monkeypatch):
    used = with_budget(base, monkeypatch, 9)
    one_pass(used, adapter, data[:2], "dapo", {})
    before = {key: factor.grad.clone() for key, factor in adapter.factors.items()}
    turns = iter([None, None])
    with pytest.raises(StopIteration):
        one_pass(used, adapter, data, "dapo", {}, between=lambda: next(turns))
    assert all(torch.equal(before[key], factor.grad) for key, factor in adapter.factors.items())
    adapter.clear_gradients()


@pytest.mark.parametrize(
    ("change", "loss", "config", "sentence"),
    [
        (lambda data: [], "dapo", {}, "no samples"),
        (lambda data: data, "hope", {}, "no loss 'hope'"),
        (lambda data: data, "dapo", {"klip": 1}, "no setting klip"),
        (
            lambda data: broken(data, 1, row=TokenRow((7, 8, 10**6), 1)),
            "dapo",
            {},
            "Sample 1.*1000000",
        ),
        (lambda data: broken(data, 1, row=TokenRow((7, -1, 9), 1)), "dapo", {}, "Sample 1.*token -1"),
        (
            lambda data: broken(data, 2, row=TokenRow((7,) * 5000, 4999)),
            "dapo",
            {},
            "Sample 2.*5000 tokens",
        ),
        (
            lambda data: broken(data, 2, row=TokenRow((7, 8), 2)),
            "dapo",
            {},
            "Sample 2.*prompt",
        ),
        (
            lambda data: broken(data, 3, old_logprobs=(-1.0,)),
            "dapo",
            {},
            "Sample 3.*1 log-probabilities",
        ),
        (lambda data: broken(data, 3, advantages=()), "grpo", {}, "Sample 3.*0 advantages"),
        (bare, "gspo", {}, "Sample 0.*0 log-probabilities"),
        (lambda data: bare(data)[:5], "dpo", {}, "dpo.*groups of 2"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(base, adapter, data, change, loss, config, sentence):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "logprobs", None)
        patch.setattr(base, "logprobs_and_entropy", None)
        with pytest.raises(ConfigError, match=sentence):
            one_pass(base, adapter, change(data), loss, config)


def test_the_limit_is_the_base_s_context_or_what_is_configured(base, tiny_base):
    context = json.loads((tiny_base / "config.json").read_text())["max_position_embeddings"]
    assert base.longest == context
    short = ResidentBase(tiny_base, threads=1, microbatch_tokens=64, longest=6)
    check_rows(short, ROWS[:2])
    assert short.score(None, ROWS[:2]) == base.score(None, ROWS[:2])
    with pytest.raises(ConfigError, match=r"Sample 2.*7 tokens"):
        check_rows(short, ROWS)


def test_metrics_are_those_of_the_whole_batch(base, adapter, data, monkeypatch):
    """Each from the whole model's logits, by plain Python."""
    config = {"kl": 0.5, "outlier": [0.85, 1.2]}
    found, _ = gradients(with_budget(base, monkeypatch, 9), adapter, data, "dapo", config)
    entropies, gaps, bases = [], [], []
    for example in data:
        with torch.no_grad(), base.using(adapter):
            logits = base.model(torch.tensor([example.row.tokens])).logits[0].log_softmax(-1)
        plain = base.score(None, [example.row])[0]
        for place, old in enumerate(example.old_logprobs):
            whole = logits[example.row.start + place - 1].tolist()
            new = whole[example.row.tokens[example.row.start + place]]
            entropies.append(-sum(math.exp(value) * value for value in whole))
            gaps.append(new - old)
            bases.append(plain[place] - new)
    ratios = [math.exp(gap) for gap in gaps]
    count = len(ratios)
    metrics = found.metrics
    assert metrics.tokens == count == 14
    assert metrics.entropy == pytest.approx(sum(entropies) / count, abs=1e-4)
    assert metrics.importance_ratio == pytest.approx(sum(ratios) / count, abs=1e-5)
    assert (metrics.ratio_min, metrics.ratio_max) == pytest.approx((min(ratios), max(ratios)), abs=1e-5)
    assert metrics.kl_old == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / count, abs=1e-5)
    assert metrics.kl == pytest.approx(sum(math.exp(gap) - gap - 1 for gap in bases) / count, abs=1e-5)
    answers = [ratios[sum(r.length for r in ROWS[:i]) :][: row.length] for i, row in enumerate(ROWS)]
    kept = [all(0.85 <= ratio <= 1.2 for ratio in answer) for answer in answers]
    learned = sum(row.length for row, keeps in zip(ROWS, kept, strict=True) if keeps)
    assert 0 < learned < count
    assert metrics.masked == {"outlier": count - learned}
    assert metrics.learned_tokens == learned
    assert metrics.correction_weight == pytest.approx(learned / count)


def test_metrics_are_finite_however_far_the_base_and_the_sampler_are():
    """JSON has no infinity. A token that the base knows and the adapter has forgotten is e^200 apart."""
    new_T, far_T = torch.tensor([-200.0, -1.0]), torch.tensor([0.0, -1.5])
    ones, none = torch.ones(2), torch.zeros(2, dtype=torch.bool)
    seen = MicrobatchStats(
        new_T=new_T, old_T=-far_T - 300, base_T=far_T, loss_T=ones, entropy_T=ones, clipped_T=none,
        learned_T=~none, factor_T=ones, capped_T=none, masked={}, strayed=0, routed=0,
    )  # fmt: skip
    metrics = measure([seen], sampled=True)
    json.dumps(asdict(metrics), allow_nan=False)
    near = measure([replace(seen, new_T=new_T[1:], old_T=far_T[1:], base_T=far_T[1:])], sampled=True)
    assert near.kl == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert metrics.kl == pytest.approx((math.exp(60) - 61 + near.kl) / 2)


def test_the_share_of_clipped_tokens(base, adapter, data):
    """Beyond the bound on the side that its advantage pushes to."""
    new = base.score(adapter, ROWS)
    gaps = [
        (n - o) * advantage
        for row, example, advantage in zip(new, data, ADVANTAGES, strict=True)
        for n, o in zip(row, example.old_logprobs, strict=True)
    ]
    metrics = gradients(base, adapter, data, "ppo", {"clip_low": 0.0, "clip_high": 0.0})[0].metrics
    assert metrics.clip_fraction == pytest.approx(sum(gap > 0 for gap in gaps) / 14)
    assert metrics.learned_tokens == sum(gap < 0 for gap in gaps)
    assert (
        gradients(base, adapter, data, "ppo", {"clip_low": 1.0, "clip_high": 9.0})[0].metrics.clip_fraction
        == 0
    )


def test_corrections_say_what_they_did(base, adapter, data):
    switched = dict.fromkeys(CORRECTIONS, True) | {"geometric": [0.85, 1.15], "tis": 1.1}
    metrics = gradients(base, adapter, data, "dapo", switched)[0].metrics
    assert metrics.masked.keys() == {"outlier", "geometric", "icepop"}
    assert metrics.masked["geometric"] > 0
    assert metrics.capped > 0
    assert metrics.learned_tokens == metrics.tokens - sum(metrics.masked.values())
    assert metrics.clip_fraction == 0


def test_without_samples_there_is_no_ratio(base, adapter, data):
    metrics = gradients(base, adapter, bare(data), "cross_entropy", {})[0].metrics
    assert (metrics.importance_ratio, metrics.ratio_min, metrics.kl, metrics.kl_old) == (None,) * 4
    assert metrics.learned_tokens == metrics.tokens == 14
    mean = -sum(value for row in base.score(adapter, ROWS) for value in row) / 14
    assert metrics.loss == pytest.approx(mean, abs=1e-5)
    # Twice the answer "chosen" against itself: nothing is preferred, and the loss is ln 2.
    pair = [Example(ROWS[0]), Example(ROWS[0])]
    assert gradients(base, adapter, pair, "dpo", {})[0].metrics.loss == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_few_steps_bring_what_the_loss_wants(base, data, loss):
    """Answers more likely by their advantage; by their examples; the chosen before the rejected."""
    fresh = base.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(4))
    before = base.score(fresh, ROWS)
    examples = [replace(example, old_logprobs=tuple(old)) for example, old in zip(data, before, strict=True)]
    examples, config = given(loss, examples)
    for _ in range(4):
        one_pass(base, fresh, examples, loss, config)
        fresh.step(1e-3, (0.9, 0.95), 1e-8, 0.0, 1.0)
    wanted = {"cross_entropy": [1.0] * 6, "dpo": [1.0, -1.0] * 3}.get(loss, ADVANTAGES)
    pairs = zip(wanted, before, base.score(fresh, ROWS), strict=True)
    assert sum(a * (sum(new) - sum(old)) for a, old, new in pairs) > 0.05
