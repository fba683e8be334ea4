"""Grouped LoRA equals the reference, on poisoned memory, for every popularity mix."""

import pytest
import torch

from kernels.dense import cpu as grouped
from kernels.dense.reference import add_lora
from tests.helpers.popularity import MIXES


def factors(slots: int, slices: int, rank: int, inputs: int, widths: tuple[int, ...], dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(slots, slices, rank, inputs, generator=generator).to(dtype)
    b = torch.randn(slots, rank, sum(widths), generator=generator).to(dtype)
    return a, b


def reference(y, x, a, b, widths, slots):
    start = 0
    for i, width in enumerate(widths):
        add_lora(y[:, start : start + width], x, a[:, i], b[..., start : start + width], slots)
        start += width


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("rank", "inputs", "widths"), [(1, 7, (5,)), (8, 48, (64, 32, 32)), (3, 33, (17, 9))]
)
def test_equals_the_reference(mix: str, rank: int, inputs: int, widths: tuple[int, ...]):
    slots = MIXES[mix]
    a, b = factors(8, len(widths), rank, inputs, widths)
    # A slot that no row names may hold anything.
    for unused in set(range(8)) - set(slots):
        a[unused] = torch.nan
        b[unused] = torch.nan
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(len(slots), inputs, generator=generator)
    want = torch.randn(len(slots), sum(widths), generator=generator)
    got = want.clone()
    before = want.clone()
    reference(want, x, a, b, widths, slots)
    plan = grouped.plan(slots)
    assert plan is not None
    grouped.add_lora(got, x, a, b, widths, plan)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (want - before).abs().max() > 0.1


def test_base_rows_are_untouched_bit_for_bit():
    slots = MIXES["with base rows"]
    a, b = factors(8, 2, 8, 48, (64, 64))
    y = torch.randn(len(slots), 128)
    x = torch.randn(len(slots), 48)
    # Base rows must not even be read: what they hold cannot leak into others.
    base = [row for row, slot in enumerate(slots) if slot < 0]
    x[base] = torch.nan
    before = y.clone()
    plan = grouped.plan(slots)
    assert plan is not None
    grouped.add_lora(y, x, a, b, (64, 64), plan)
    assert torch.equal(y[base], before[base])
    assert not y.isnan().any()


def test_only_base_rows_need_no_plan():
    assert grouped.plan([-1, -1]) is None
    assert grouped.plan([]) is None


def test_adjacent_slots_copy_no_factor():
    plan = grouped.plan([0, 1, 2, 3, 4, 5, 6, 7] * 8)
    assert plan is not None
    assert plan.slots == slice(0, 8)
    assert plan.tile == 8


def test_bfloat16_within_its_own_rounding():
    slots = MIXES["uniform"]
    a, b = factors(8, 1, 8, 256, (256,), torch.bfloat16)
    x = torch.randn(64, 256).bfloat16()
    want = torch.zeros(64, 256)
    reference(want, x.float(), a.float(), b.float(), (256,), slots)
    got = torch.zeros(64, 256).bfloat16()
    plan = grouped.plan(slots)
    assert plan is not None
    grouped.add_lora(got, x, a, b, (256,), plan)
    # Two roundings to 8 bits of mantissa, of the intermediate and of the result.
    error = (got.float() - want).abs().max() / want.abs().max()
    assert error < 2 * 2**-8


@pytest.mark.parametrize("mix", MIXES)
def test_a_row_does_not_depend_on_its_batch(mix: str):
    slots = MIXES[mix]
    a, b = factors(8, 2, 8, 48, (64, 32))
    x, y = torch.randn(len(slots), 48), torch.randn(len(slots), 96)
    together = y.clone()
    grouped.add_lora(together, x, a, b, (64, 32), grouped.plan(slots))
    for row, slot in enumerate(slots[:9]):
        alone = y[row : row + 1].clone()
        if slot >= 0:
            grouped.add_lora(alone, x[row : row + 1], a, b, (64, 32), grouped.plan([slot]))
        assert torch.equal(alone[0], together[row])
