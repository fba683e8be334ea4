"""The comparison of LoRA's gradients on experts: three ways, one result, and a limit that none can beat."""

import sys

import pytest
import torch

from tests.helpers.bench_files import BENCH

sys.path.insert(0, str(BENCH / "kernels"))
import experts_gradients
from experts_gradients import Layer, compare, layer, limit_s

CPU = torch.device("cpu")


@pytest.fixture
def given() -> Layer:
    return layer(24, 2, 8, 32, 16, CPU, torch.float32)


def test_the_three_ways_agree(given: Layer) -> None:
    assert sorted(compare(given, 1)) == ["grouped", "loop", "ours"]


def test_no_figure_counts_for_a_way_that_is_wrong(given: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experts_gradients.WAYS, "ours", lambda given: experts_gradients.ours(given) * 1.001)
    with pytest.raises(SystemExit, match="ours is off by"):
        compare(given, 1)


def test_the_limit_is_the_slower_of_bytes_and_products(given: Layer) -> None:
    # By hand: 24 tokens of 32 numbers thrice, 192 pairs of 16 twice, two factors of 2 x 128 x 8 x (32 + 16).
    moved = 4 * (3 * 24 * 32 + 2 * 192 * 16 + 3 * 2 * 128 * 8 * (32 + 16))
    products = 3 * 2 * 192 * 8 * (32 + 16)
    assert limit_s(given, 1.0, 1e30) == moved
    assert limit_s(given, 1e30, 1.0) == products
