"""LoRA on experts equals the reference: every shape, dtype and popularity mix, and every gradient."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from kernels.experts import autograd as experts_grad
from kernels.experts import cpu as experts
from kernels.experts import cpu_grouped as experts_grouped
from kernels.experts import reference as experts_reference
from tests.helpers import routed_batches as testing
from tests.helpers.repository import ROOT

MIXES = {
    "one token": [0],
    "every slot": [3, 0, 2, 1],
    "identical": [1] * 33,
    "distinct": list(range(16)),
    "zipf": [0] * 20 + [1] * 7 + [2] * 3 + [5],
    "with base rows": [-1, 2, -1, 2, 7, -1, 0, 0, -1],
}
# In units of the dtype's last place, relative to the largest value; both bounds from the rounding that
# is there, about twice what was seen. float32: sums of up to 256 terms in another order. bfloat16:
# half a unit for h, for its product with the routing weight, for the result and for y.
LIMITS = {torch.float32: 16, torch.bfloat16: 2}


def run(batch: testing.Routed, y: torch.Tensor, size: int | None = None) -> None:
    """Add the batch's LoRA to y; `size` forces a tile."""
    plan = experts.plan(batch.slots, batch.experts)
    if plan is None:
        return
    forced = patch.object(experts.RoutingPlan, "size", lambda *_: size) if size else nullcontext()
    with forced:
        h = experts.shrink(batch.x, batch.a, plan)
        experts.expand(y, h, batch.b.transpose(-1, -2), plan, batch.weights)


def take(batch: testing.Routed, rows: list[int]) -> testing.Routed:
    return testing.Routed(
        batch.x[rows], batch.a, batch.b, batch.slots[rows], batch.experts[rows], batch.weights[rows]
    )


def blank(batch: testing.Routed, reduce: bool) -> torch.Tensor:
    shape = (len(batch.slots),) if reduce else batch.experts.shape
    return torch.randn(*shape, batch.b.shape[2]).to(batch.x.dtype)


def reference(batch: testing.Routed, y: torch.Tensor, weighted: bool = True) -> torch.Tensor:
    exact, want = batch.to(torch.float64), y.double()
    h = experts_reference.shrink_experts(exact.x, exact.a, exact.slots, exact.experts)
    weights = exact.weights if weighted else None
    experts_reference.expand_experts(want, h, exact.b, exact.slots, exact.experts, weights)
    return want


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shared", ["", "A", "B", "AB"])
@pytest.mark.parametrize("rows", ["token", "pair"])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_the_reference(mix: str, rows: str, shared: str, dtype: torch.dtype):
    batch = testing.routed(MIXES[mix], shared=shared, rows=rows, dtype=dtype)
    for reduce in (False, True):
        for size in (None, 4, 16):
            y = blank(batch, reduce)
            want, before = reference(batch, y), y.clone()
            assert (want - before.double()).nan_to_num().abs().max() > 0.1
            run(batch, y, size)
            assert testing.error(y, want) <= LIMITS[dtype] * testing.EPS[dtype]
            # Not even the sign of a zero may change.
            assert torch.equal(y[batch.slots < 0], before[batch.slots < 0])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shared", ["", "A", "B", "AB"])
@pytest.mark.parametrize("rows", ["token", "pair"])
@pytest.mark.parametrize("mix", MIXES)
def test_grouped_products_equal_the_reference(mix: str, rows: str, shared: str, dtype: torch.dtype):
    batch = testing.routed(MIXES[mix], shared=shared, rows=rows, dtype=dtype)
    plan = experts_grouped.plan(batch.slots, batch.experts)
    for reduce in (False, True):
        y = blank(batch, reduce)
        want, before = reference(batch, y, weighted=False), y.clone()
        h = experts_grouped.shrink(batch.x, batch.a, plan)
        experts_grouped.expand(y, h, batch.b.transpose(-1, -2), plan)
        assert testing.error(y, want) <= LIMITS[dtype] * testing.EPS[dtype]
        assert torch.equal(y[batch.slots < 0], before[batch.slots < 0])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("top_k", "count", "rank", "inputs", "outputs"),
    [(1, 1, 1, 1, 1), (1, 4, 5, 7, 3), (8, 8, 8, 64, 96), (8, 16, 33, 31, 65), (3, 5, 64, 256, 40)],
)
def test_odd_shapes(top_k: int, count: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype):
    for slots in (MIXES["with base rows"], MIXES["identical"]):
        batch = testing.routed(slots, top_k, count, rank, inputs, outputs, dtype=dtype)
        y = blank(batch, reduce=False)
        want = reference(batch, y)
        run(batch, y)
        assert testing.error(y, want) <= LIMITS[dtype] * testing.EPS[dtype]


def test_base_rows_keep_the_sign_of_zero():
    batch = testing.routed([-1, 0, -1])
    y = torch.full((3, 2, 13), -0.0)
    run(batch, y)
    assert y[batch.slots < 0].signbit().all()
    assert not y.isnan().any()


def test_no_adapter_needs_no_plan():
    nobody = torch.tensor([-1, -1])
    assert experts.plan(nobody, torch.zeros(2, 2, dtype=torch.long)) is None
    assert experts.plan(nobody[:0], torch.zeros(0, 2, dtype=torch.long)) is None
    batch = testing.routed([-1, -1])
    assert torch.equal(
        experts_grad.lora(batch.x, batch.a, batch.b, batch.slots, batch.experts), torch.zeros(2, 2, 13)
    )


def test_a_rank_major_factor_gives_the_same_bits():
    batch = testing.routed(MIXES["zipf"])
    y = blank(batch, reduce=False)
    again = y.clone()
    run(batch, y)
    view = testing.rank_major(batch.b)
    assert view.transpose(-1, -2).is_contiguous()
    run(testing.Routed(batch.x, batch.a, view, batch.slots, batch.experts, batch.weights), again)
    assert torch.equal(y, again)


def test_a_fused_module_shrinks_once_and_expands_each_slice():
    """Gate and up side by side: A's ranks stacked, B and y as views on the halves."""
    gate, up = (testing.routed(MIXES["with base rows"], seed=seed) for seed in (1, 2))
    y = torch.randn(9, 2, 26)
    want = y.double()
    plan = experts.plan(gate.slots, gate.experts)
    assert plan is not None
    # The routing is the first batch's for both; what the second poisoned elsewhere must not be read.
    a, b = torch.cat([gate.a, up.a.nan_to_num()], 2), (gate.b, up.b.nan_to_num())
    h = experts.shrink(gate.x, a, plan)
    for i, factor in enumerate(b):
        half = slice(13 * i, 13 * i + 13)
        experts.expand(y[..., half], h[..., 3 * i : 3 * i + 3], factor.transpose(-1, -2), plan)
        one = testing.Routed(
            gate.x, a[:, :, 3 * i : 3 * i + 3], factor, gate.slots, gate.experts, gate.weights
        )
        exact = one.to(torch.float64)
        h_one = experts_reference.shrink_experts(exact.x, exact.a, exact.slots, exact.experts)
        experts_reference.expand_experts(want[..., half], h_one, exact.b, exact.slots, exact.experts)
    assert testing.error(y, want) <= LIMITS[torch.float32] * testing.EPS[torch.float32]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("rank", "inputs"), [(3, 17), (8, 256), (1, 48)])
@pytest.mark.parametrize("shared", ["", "A", "B"])
def test_a_decoded_row_has_the_same_bits_in_any_batch(
    shared: str, rank: int, inputs: int, dtype: torch.dtype
):
    batch = testing.routed([0, 1, 1, -1, 2, 1] * 8, 4, 8, rank, inputs, 40, shared, dtype=dtype)
    everything = torch.zeros(48, 4, 40, dtype=dtype)
    run(batch, everything)
    for rows in ([0], [1], [3], [47], [5, 2, 7], list(range(47, -1, -1))):
        y = torch.zeros(len(rows), 4, 40, dtype=dtype)
        run(take(batch, rows), y)
        assert torch.equal(y, everything[rows])


def test_tiles_are_used_where_they_are_cheaper():
    batch = testing.routed([0] * 700, rank=16, inputs=128)
    plan = experts.plan(batch.slots, batch.experts)
    distinct = experts.plan(torch.arange(700), batch.experts)
    assert plan is not None
    assert distinct is not None
    assert plan.size(4, 2, elements=16 * 128) == 64
    assert plan.size(4, 2, elements=8) == 1
    assert distinct.size(4, 2, elements=16 * 128) == 1
    y = blank(batch, reduce=True)
    want = reference(batch, y)
    run(batch, y)
    assert testing.error(y, want) <= LIMITS[torch.float32] * testing.EPS[torch.float32]


@pytest.mark.parametrize("shared", ["", "A", "B", "AB"])
@pytest.mark.parametrize("rows", ["token", "pair"])
@pytest.mark.parametrize("way", ["pairs", "tiles", "grouped"])
def test_gradients_equal_the_reference(way: str, rows: str, shared: str, monkeypatch: pytest.MonkeyPatch):
    slots = MIXES["with base rows"] + [1] * 31
    ops = experts_grouped if way == "grouped" else experts
    if way == "tiles":
        monkeypatch.setattr(experts, "COPIED_WITHOUT_TILES", 0)
        assert experts.cheapest(torch.tensor(slots[9:])) > 1
    for dtype in LIMITS:
        batch = testing.routed(slots, shared=shared, rows=rows, dtype=dtype)
        inputs = [v.requires_grad_() for v in (batch.x, batch.a, batch.b)]
        y = experts_grad.lora(*inputs, batch.slots, batch.experts, ops=ops)
        dy = torch.randn(y.shape).to(dtype)
        got = torch.autograd.grad(y, inputs, dy)
        wanted = testing.reference_gradients(batch, dy)
        for found, want in zip(got, wanted, strict=True):
            assert want.abs().max() > 0.1
            # Twice: h, its gradient and a tile's sum are rounded as well.
            assert testing.error(found, want) <= 2 * LIMITS[dtype] * testing.EPS[dtype]


@pytest.mark.parametrize(("rows", "shared"), [("token", ""), ("pair", "B"), ("token", "A")])
def test_gradients_pass_gradcheck(rows: str, shared: str):
    batch = testing.routed([0, -1, 1, 0], 2, 3, 2, 4, 3, shared, rows, torch.float64)
    # gradcheck moves every element, also those that must not be read; NaN is no number to move.
    inputs = [v.nan_to_num().requires_grad_() for v in (batch.x, batch.a, batch.b)]

    def lora(x, a, b):
        return experts_grad.lora(x, a, b, batch.slots, batch.experts)

    assert torch.autograd.gradcheck(lora, inputs)


def test_two_runs_give_the_same_bits():
    batch = testing.routed([0, 1, 2, 1, -1] * 60, 4, 8, 8, 64, 64, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        inputs = [v.detach().requires_grad_() for v in (batch.x, batch.a, batch.b)]
        y = experts_grad.lora(*inputs, batch.slots, batch.experts)
        runs.append([y, *torch.autograd.grad(y, inputs, torch.ones_like(y))])
    assert all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in zip(*runs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_the_triton_kernels_compile_for_a_gpu(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Down to machine code, which takes no GPU: the interpreter accepts more than the compiler does."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.experts import triton as experts_triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    pointers = dict.fromkeys(
        ("order", "starts", "tile_segment", "tile_first", "slots", "rows", "programs"), "*i64"
    )
    tile = {"M": 16, "RANK": 16, "BLOCK": 64, "UPCAST": False}
    kernels = [
        (experts_triton.shrink_kernel, tile),
        (experts_triton.expand_kernel, {**tile, "ADD": True}),
        (experts_triton.combine_kernel, {"BLOCK": 64}),
        (experts_triton.outer_kernel, tile),
    ]
    for dtype in ("*bf16", "*fp32"):
        tensors = dict.fromkeys(("x", "w", "h", "y", "grad"), dtype)
        for kernel, constants in kernels:
            types = {**dict.fromkeys(kernel.arg_names, "i32"), **pointers, **tensors, "pairs": "*fp32"}
            signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
            values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
            compiled = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=values),
                target=GPUTarget("cuda", capability, 32),
            )
            assert compiled.asm["cubin"]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves here")
def test_the_triton_kernels_under_their_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    # A process of its own: Triton must see the setting before anything imports it, and only here.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_expert_triton.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
