"""Several adapters in one forward and backward: each gets what it gets alone."""

from dataclasses import asdict, replace

import pytest
import torch

from engine.errors import ConfigError
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from engine.training.model.update import LossCall, forward_backward, is_worth_fusing
from tests.helpers.mla_bases import deepseek_v3
from tests.helpers.moe_bases import qwen3_moe
from tests.helpers.packed_rows import ROWS
from tests.helpers.resident_bases import resident

# Policies of different rank, alpha and targets, some of them with the same.
POLICIES = (
    (4, 8.0, None),
    (2, 2.0, None),
    (4, 4.0, ("q_proj", "down_proj", "o_proj")),
    (3, 6.0, ("o_proj", "gate_proj")),
)
SHARES = (ROWS[:4], ROWS[:3], ROWS[4:], [ROWS[0], ROWS[8]])


@pytest.fixture(scope="module")
def bases(tiny_base, tmp_path_factory):
    root = tmp_path_factory.mktemp("fused")
    # Experts of whole 32s, as real ones: the end of a narrower row is computed by another function.
    moe = qwen3_moe(root / "moe", tiny_base, moe_intermediate_size=64)
    paths = {"dense": tiny_base, "moe": moe, "mla": deepseek_v3(root / "mla", tiny_base)}
    return {kind: resident(path, 1, 4096) for kind, path in paths.items()}


def adapters(base: ResidentBase) -> list:
    found = []
    for seed, (rank, alpha, targets) in enumerate(POLICIES):
        generator = torch.Generator().manual_seed(seed)
        known = [name for name in targets or base.shapes.targets if name in base.shapes.targets]
        found.append(base.new_adapter(rank, alpha, known, generator))
        with torch.no_grad():
            for key, factor in found[-1].factors.items():
                if key.endswith("lora_B"):
                    factor.copy_(torch.randn(factor.shape, generator=generator) * 0.05)
    return found


def weights(rows: list[TokenRow], seed: int) -> torch.Tensor:
    """What each completion token is worth in a mean over all of them: another slope everywhere."""
    count = sum(row.length for row in rows)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) / count


def together(base: ResidentBase, policies: list, shares) -> list[torch.Tensor]:
    """Add every policy's gradients in one pass; return their log-probabilities."""
    stream = base.pack(shares)
    with base.using_many(list(zip(policies, stream.counts, strict=True))):
        logprob_N = base.logprobs(stream)
        value_N = torch.cat([weights(rows, number) for number, rows in enumerate(shares)])
        (logprob_N * value_N).sum().backward()
    return list(logprob_N.detach().split([sum(row.length for row in rows) for rows in shares]))


def alone(base: ResidentBase, adapter, rows: list[TokenRow], number: int) -> torch.Tensor:
    with base.using(adapter):
        logprob_N = base.logprobs(rows)
        (logprob_N * weights(rows, number)).sum().backward()
    return logprob_N.detach()


@pytest.mark.parametrize("kind", ["dense", "moe", "mla"])
def test_gradients_are_those_of_each_alone_bit_for_bit(bases, kind):
    """Alone, some experts get too few tokens for the BLAS to sum as it does for more."""
    base = bases[kind]
    fused, single = adapters(base), adapters(base)
    logprobs = together(base, fused, SHARES)
    for number, (adapter, rows) in enumerate(zip(single, SHARES, strict=True)):
        wanted = alone(base, adapter, rows, number)
        assert torch.equal(logprobs[number], wanted), number
        for key, factor in adapter.factors.items():
            assert torch.equal(fused[number].factors[key].grad, factor.grad), (number, key)
        assert max(factor.grad.abs().max() for factor in adapter.factors.values()) > 1e-2


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_five_steps_beside_others_make_the_adapter_that_five_alone_make(bases, kind):
    base = bases[kind]
    fused, single = adapters(base), adapters(base)
    before = fused[0].canonical(torch.float32)
    adam = (1e-3, (0.9, 0.95), 1e-8, 0.0, 1.0)
    for _ in range(5):
        together(base, fused, SHARES)
        for number, (adapter, rows) in enumerate(zip(single, SHARES, strict=True)):
            alone(base, adapter, rows, number)
            adapter.step(*adam)
            fused[number].step(*adam)
    for one, other in zip(fused, single, strict=True):
        found, wanted = one.canonical(torch.float32), other.canonical(torch.float32)
        assert max((found[key] - wanted[key]).abs().max() for key in wanted) <= 1e-5
    after = single[0].canonical(torch.float32)
    assert max((after[key] - before[key]).abs().max() for key in before) > 1e-3


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_part_without_factors_on_a_projection_is_the_base_there(bases, kind):
    """A policy of zeros between others reads what the base reads."""
    base = bases[kind]
    fresh = base.new_adapter(2, 2.0, ("o_proj",), torch.Generator().manual_seed(9))
    policies = [adapters(base)[0], fresh, adapters(base)[1]]
    with torch.no_grad():
        found = together_scores(base, policies, SHARES[:3])[1]
        torch.testing.assert_close(found, base.logprobs(SHARES[1]), rtol=0, atol=1e-5)


def together_scores(base: ResidentBase, policies: list, shares) -> list[torch.Tensor]:
    stream = base.pack(shares)
    with base.using_many(list(zip(policies, stream.counts, strict=True))):
        return list(base.logprobs(stream).split([sum(row.length for row in rows) for rows in shares]))


def calls_of(policies: list, losses=("grpo", "dapo", "importance_sampling", "gspo")) -> list[LossCall]:
    """Each policy's own examples, loss and settings; one of them pulls towards the base."""
    configs = ({}, {"kl": 0.1}, {}, {})
    generator = torch.Generator().manual_seed(5)
    return [
        LossCall(
            adapter,
            [
                Example(
                    row, (-4.0,) * row.length, (torch.randn((), generator=generator).item(),) * row.length
                )
                for row in rows
            ],
            loss,
            config,
        )
        for adapter, rows, loss, config in zip(policies, SHARES, losses, configs, strict=True)
    ]


@pytest.mark.parametrize("budget", [20, 4096])
def test_calls_of_several_sessions_give_what_each_gives_alone(bases, monkeypatch, budget):
    base = bases["moe"]
    monkeypatch.setattr(base, "microbatch_tokens", budget)
    fused, single = adapters(base), adapters(base)
    results = forward_backward(base, calls_of(fused))
    for number, call in enumerate(calls_of(single)):
        wanted = forward_backward(base, [call])[0]
        for found, value in zip(results[number].logprobs, wanted.logprobs, strict=True):
            assert found == pytest.approx(value, abs=1e-5)
        found, value = asdict(results[number].metrics), asdict(wanted.metrics)
        for name in ("masked", "kl"):
            assert bool(found[name]) == bool(value[name])
        numbers = [name for name, number in value.items() if isinstance(number, (int, float))]
        assert [found[name] for name in numbers] == pytest.approx([value[name] for name in numbers], rel=1e-4)
        for key, factor in call.adapter.factors.items():
            torch.testing.assert_close(fused[number].factors[key].grad, factor.grad, rtol=1e-5, atol=1e-6)


def test_a_call_that_fails_leaves_every_policys_gradients(bases):
    base = bases["dense"]
    policies = adapters(base)
    calls = calls_of(policies)
    forward_backward(base, calls)
    before = [{key: factor.grad.clone() for key, factor in one.factors.items()} for one in policies]
    broken = replace(calls[2].data[1], advantages=(float("nan"),) * calls[2].data[1].row.length)
    calls[2] = replace(calls[2], data=[calls[2].data[0], broken, *calls[2].data[2:]])
    with pytest.raises(ConfigError, match=r"sample 1\b.*finite"):
        forward_backward(base, calls)
    for one, gradients in zip(policies, before, strict=True):
        assert all(torch.equal(factor.grad, gradients[key]) for key, factor in one.factors.items())


def test_only_small_calls_of_several_policies_are_fused(bases, monkeypatch):
    base = bases["dense"]
    calls = calls_of(adapters(base))
    assert is_worth_fusing(base, calls)
    assert not is_worth_fusing(base, calls[:1])
    many = [Example(TokenRow((1, *range(2, 80)), 1), (-1.0,) * 78, (1.0,) * 78)] * 60
    assert not is_worth_fusing(base, [replace(call, data=many) for call in calls])
    # A small one beside a large one takes its turn too.
    assert not is_worth_fusing(base, [calls[0], replace(calls[1], data=many)])
    first = calls[0].data[0]
    routed = replace(first, row=replace(first.row, routes=torch.zeros(1, 2, 2, dtype=torch.long)))
    replaying = [replace(calls[0], data=[routed]), *calls[1:]]
    assert not is_worth_fusing(base, replaying)
    with pytest.raises(ConfigError, match=r"pass.*routed_experts"):
        forward_backward(base, replaying)
    monkeypatch.setattr(base, "packs", False)
    assert not is_worth_fusing(base, calls)
    with pytest.raises(ConfigError, match=r"pass.*packed"):
        forward_backward(base, calls)
