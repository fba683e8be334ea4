"""The Triton kernels equal the reference: on a GPU, or under Triton's interpreter at the same small sizes.

python -m pytest -m gpu tests/gpu/test_expert_triton.py                        # on a GPU
TRITON_INTERPRET=1 python -m pytest -m gpu tests/gpu/test_expert_triton.py     # anywhere
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="no GPU, and TRITON_INTERPRET is not 1"
    ),
]

from kernels.experts import autograd as experts_grad  # noqa: E402
from kernels.experts import reference as experts_reference  # noqa: E402
from kernels.experts import triton as experts_triton  # noqa: E402
from tests.helpers import routed_batches as testing  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
MIXES = {
    "empty": [],
    "one token": [0],
    "all base": [-1, -1],
    "every slot": [3, 0, 2, 1],
    "identical": [1] * 20,
    "with base rows": [-1, 2, 0, 2, -1, 1],
}
# In units of the dtype's last place, relative to the largest value. float32: sums of up to 100 terms
# in another order. bfloat16: h is rounded once and the result once, half a unit each, and a sum of
# rounded h's adds the rest.
LIMITS = {torch.float32: 16, torch.bfloat16: 2}


def on_device(batch: testing.Routed) -> testing.Routed:
    return testing.Routed(*(v.to(DEVICE) for v in (batch.x, batch.a, batch.b)),
                          *(v.to(DEVICE) for v in (batch.slots, batch.experts, batch.weights)))  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "inputs", "outputs", "dtype"),
    [(3, 17, 70, torch.float32), (20, 100, 13, torch.float32), (3, 17, 70, torch.bfloat16)],
)
@pytest.mark.parametrize("mix", MIXES)
def test_forward_equals_the_reference(mix: str, rank: int, inputs: int, outputs: int, dtype: torch.dtype):
    for shared, rows, reduce in (("", "token", False), ("A", "token", False), ("B", "pair", True)):
        batch = testing.routed(MIXES[mix], 2, 4, rank, inputs, outputs, shared, rows, dtype)
        yardstick = batch.to(torch.float64)
        y = torch.randn(len(MIXES[mix]), *([] if reduce else [2]), outputs).to(dtype)
        want, before = y.double(), y.clone()
        h = experts_reference.shrink_experts(yardstick.x, yardstick.a, batch.slots, batch.experts)
        experts_reference.expand_experts(want, h, yardstick.b, batch.slots, batch.experts)
        d = on_device(batch)
        plan, got = experts_triton.plan(d.slots, d.experts), y.to(DEVICE)
        h = experts_triton.shrink(d.x, d.a, plan)
        experts_triton.expand(got, h, d.b.transpose(-1, -2), plan)
        assert testing.error(got.cpu(), want) <= LIMITS[dtype] * testing.EPS[dtype]
        assert torch.equal(got.cpu()[batch.slots < 0], before[batch.slots < 0])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shared", ["", "A", "B"])
def test_gradients_equal_the_reference(shared: str, dtype: torch.dtype):
    slots = MIXES["with base rows"] + MIXES["identical"]
    batch = testing.routed(slots, 2, 4, 5, 70, 33, shared, "token", dtype)
    d = on_device(batch)
    inputs = [v.requires_grad_() for v in (d.x, d.a, d.b)]
    y = experts_grad.lora(*inputs, d.slots, d.experts, ops=experts_triton)
    dy = torch.randn(y.shape).to(dtype)
    got = torch.autograd.grad(y, inputs, dy.to(DEVICE))
    wanted = testing.reference_gradients(batch, dy)
    for found, want in zip(got, wanted, strict=True):
        assert want.abs().max() > 0.1
        # bfloat16: h and its gradient are rounded as well, and a factor's gradient is a sum of them.
        assert testing.error(found.cpu(), want) <= 2 * LIMITS[dtype] * testing.EPS[dtype]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's product is numpy's: a row's place matters")
def test_a_row_has_the_same_bits_in_any_batch():
    batch = on_device(testing.routed([0, 1, 1, -1, 2, 1] * 4, 2, 4, 8, 70, 40))

    def run(rows: torch.Tensor) -> torch.Tensor:
        plan = experts_triton.plan(batch.slots[rows], batch.experts[rows])
        y = torch.zeros(len(rows), 40, device=DEVICE)
        h = experts_triton.shrink(batch.x[rows], batch.a, plan)
        experts_triton.expand(y, h, batch.b.transpose(-1, -2), plan)
        return y

    everything = run(torch.arange(24, device=DEVICE))
    for row in (0, 1, 3, 23):
        assert torch.equal(run(torch.tensor([row], device=DEVICE))[0], everything[row])


def test_reasons_name_what_does_not_fit():
    x, factor = torch.zeros(2, 8, device=DEVICE), torch.zeros(1, 2, 4, 8, device=DEVICE)
    assert experts_triton.unsupported_reason(x, factor) is None
    assert "float64" in str(experts_triton.unsupported_reason(x.double(), factor.double()))
    assert "rank 200" in str(experts_triton.unsupported_reason(x, factor.new_zeros(1, 2, 200, 8)))
    assert "bfloat16" in str(experts_triton.unsupported_reason(x.bfloat16(), factor))
