"""LoRA on the resident base equals the merged weights and PEFT, and adapters do not meet."""

import pytest
import torch

from engine.errors import AdapterError, ConfigError
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from tests.helpers.close_rows import close
from tests.helpers.training_pass import one_pass

TARGETS = ("q_proj", "v_proj", "down_proj")
ROWS = [TokenRow((5, 9, 30, 31, 32), 2), TokenRow((7, 8, 40), 1), TokenRow((11, 12, 13, 14, 15, 16, 17), 6)]


@pytest.fixture(scope="module")
def base(tiny_base) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=64)


def moved(base: ResidentBase, seed: int, rank: int = 4, alpha: float = 8.0, targets=TARGETS):
    """An adapter whose B is not zero any more."""
    generator = torch.Generator().manual_seed(seed)
    adapter = base.new_adapter(rank, alpha, targets, generator)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return adapter


def merged_scores(tiny_base, tensors) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    for name in {key.rpartition(".lora_")[0] for key in tensors}:
        delta = tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
        model.get_submodule(name).weight.data += delta
    scores = []
    for row in ROWS:
        with torch.no_grad():
            logprobs = model(torch.tensor([row.tokens])).logits.log_softmax(-1)[0]
        scores.append([logprobs[i - 1, row.tokens[i]].item() for i in range(row.start, len(row.tokens))])
    return scores


def test_scores_equal_the_merged_weights(base, tiny_base):
    adapter = moved(base, 1)
    found = base.score(adapter, ROWS)
    assert close(found, merged_scores(tiny_base, adapter.canonical(torch.float32)))
    assert not close(found, base.score(None, ROWS), 1e-2)


def test_scores_equal_peft_on_the_exported_directory(base, tiny_base, tmp_path):
    """The second route: what is exported opens in plain PEFT and says the same."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from engine.adapters.revision import make_manifest, write_revision

    adapter = moved(base, 2)
    tensors = adapter.canonical(torch.float32)
    manifest = make_manifest(
        tensors, policy="sums", base_digest="b" * 64, rank=4, targets=tuple(sorted(TARGETS)), step=1,
        parent=None, config={},
    )  # fmt: skip
    directory = write_revision(tmp_path / "revision", tensors, manifest, {})
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), directory)
    row = ROWS[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([row.tokens])).logits.log_softmax(-1)[0]
    want = [logprobs[i - 1, row.tokens[i]].item() for i in range(row.start, len(row.tokens))]
    assert close([base.score(adapter, ROWS)[0]], [want])


def test_a_new_adapter_is_the_base(base):
    fresh = base.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(0))
    assert base.score(fresh, ROWS) == base.score(None, ROWS)


def test_training_one_adapter_changes_no_other(base):
    one, two = moved(base, 3), moved(base, 4, rank=2, targets=("o_proj",))
    before = base.score(two, ROWS), base.score(None, ROWS)
    for _ in range(3):
        one_pass(
            base,
            one,
            [
                Example(row, (-1.0,) * (len(row.tokens) - row.start), (1.0,) * (len(row.tokens) - row.start))
                for row in ROWS
            ],
            "importance_sampling",
            {},
        )
        one.step(1e-2, (0.9, 0.95), 1e-8, 0.0, 1.0)
    assert (base.score(two, ROWS), base.score(None, ROWS)) == before
    assert all(parameter.grad is None for parameter in base.model.parameters())


def examples_of(base, adapter) -> list[Example]:
    scores = base.score(adapter, ROWS)
    return [
        Example(row, tuple(old), (advantage,) * len(old))
        for row, old, advantage in zip(ROWS, scores, (1.0, -0.5, 2.0), strict=True)
    ]


def test_the_gradient_does_not_depend_on_the_packing(base):
    adapter = moved(base, 5)
    data = examples_of(base, adapter)
    gradients = []
    for budget in (7, 64):
        base.microbatch_tokens = budget
        one_pass(base, adapter, data, "dapo", {})
        gradients.append({key: factor.grad.clone() for key, factor in adapter.factors.items()})
        adapter.clear_gradients()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], rtol=1e-4, atol=1e-6)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0].values())


def test_on_policy_the_ratio_is_one_and_the_gradient_is_finite_differences(base):
    adapter = moved(base, 6)
    data = examples_of(base, adapter)
    found = one_pass(base, adapter, data, "dapo", {})
    assert found.metrics.importance_ratio == pytest.approx(1.0, abs=1e-5)
    assert found.metrics.tokens == sum(len(row.tokens) - row.start for row in ROWS)
    key = next(key for key in adapter.factors if key.endswith("down_proj.lora_B"))
    factor = adapter.factors[key]
    gradient = factor.grad.clone()
    adapter.clear_gradients()
    step = 1e-2 * gradient / gradient.norm()

    def surrogate() -> float:
        new = base.score(adapter, ROWS)
        return (
            -sum(
                a * sum(torch.tensor(n).sub(torch.tensor(e.old_logprobs)).exp().tolist())
                for n, e, a in zip(new, data, (1.0, -0.5, 2.0), strict=True)
            )
            / found.metrics.tokens
        )

    with torch.no_grad():
        factor += step
        above = surrogate()
        factor -= 2 * step
        below = surrogate()
        factor += step
    slope = (above - below) / (2 * step.norm().item())
    assert slope == pytest.approx(gradient.norm().item(), rel=0.02)


def test_a_parent_is_continued_exactly(base):
    parent = moved(base, 7)
    child = base.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(9))
    child.place(parent.canonical(torch.float32))
    assert close(base.score(child, ROWS), base.score(parent, ROWS), 1e-6)
    with pytest.raises(AdapterError, match=r"rank 4.*rank 2"):
        base.new_adapter(2, 8.0, TARGETS, torch.Generator()).place(parent.canonical(torch.float32))


def test_unknown_targets_and_losses_are_named(base):
    with pytest.raises(ConfigError, match="no projections z_proj"):
        base.new_adapter(4, 8.0, ("z_proj",), torch.Generator())
    with pytest.raises(ConfigError, match="no loss 'hope'"):
        one_pass(base, moved(base, 8), examples_of(base, None), "hope", {})
