"""Products with experts' weights equal a loop over pairs, and a row's bits are its own."""

import pytest
import torch

from kernels import routed

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def batch(tokens: int, dtype: torch.dtype, experts: int = 8, each: int = 2):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :each]
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    weight = (torch.randn(experts, 40, 64, generator=generator) / 8).to(dtype)
    bias = torch.randn(experts, 40, generator=generator).to(dtype)
    return ids, x, weight, bias


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_equals_a_loop_over_pairs(tokens: int, dtype: torch.dtype):
    ids, x, weight, bias = batch(tokens, dtype)
    # An expert that no pair names may hold anything.
    weight[list(set(range(8)) - set(ids.flatten().tolist()))] = torch.nan
    groups = routed.group(ids, len(weight))
    pairs = [(token, expert) for token, row in enumerate(ids.tolist()) for expert in row]
    want = torch.stack([weight[e].double() @ x[t].double() + bias[e].double() for t, e in pairs])
    for rows in (x, x.repeat_interleave(2, 0)):
        got = groups.product(rows, weight, bias).double()
        assert (got - want).abs().max() <= LIMITS[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype):
    ids, x, weight, _ = batch(64, dtype)
    together = routed.group(ids, len(weight)).product(x, weight).view(64, 2, -1)
    for count in (1, 2, 3, 5):
        alone = routed.group(ids[:count], len(weight)).product(x[:count], weight).view(count, 2, -1)
        assert torch.equal(alone, together[:count])
