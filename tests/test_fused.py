"""Several adapters in one forward and backward: each gets what it gets alone."""

import pytest
import torch
from mla_bases import deepseek_v3
from moe_bases import qwen3_moe
from test_packing import ROWS

from engine.training.lora import ResidentBase, Row

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
    makers = {"moe": qwen3_moe, "mla": deepseek_v3}
    paths = {"dense": tiny_base} | {kind: make(root / kind, tiny_base) for kind, make in makers.items()}
    return {kind: ResidentBase(path, 1, 4096) for kind, path in paths.items()}


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


def weights(rows: list[Row], seed: int) -> torch.Tensor:
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


def alone(base: ResidentBase, adapter, rows: list[Row], number: int) -> torch.Tensor:
    with base.using(adapter):
        logprob_N = base.logprobs(rows)
        (logprob_N * weights(rows, number)).sum().backward()
    return logprob_N.detach()


@pytest.mark.parametrize("kind", ["dense", "moe", "mla"])
def test_gradients_are_those_of_each_alone(bases, kind):
    base = bases[kind]
    fused, single = adapters(base), adapters(base)
    logprobs = together(base, fused, SHARES)
    for number, (adapter, rows) in enumerate(zip(single, SHARES, strict=True)):
        wanted = alone(base, adapter, rows, number)
        torch.testing.assert_close(logprobs[number], wanted, rtol=0, atol=1e-5)
        for key, factor in adapter.factors.items():
            error = (fused[number].factors[key].grad - factor.grad).abs().max()
            assert error <= 1e-6 * max(1.0, factor.grad.abs().max()), (number, key, error)
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
