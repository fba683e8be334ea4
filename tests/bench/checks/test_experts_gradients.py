"""The comparison of LoRA's gradients on experts: three ways, one result."""

import sys

import pytest
import torch

from tests.helpers.bench_files import BENCH

sys.path.insert(0, str(BENCH / "kernels"))
import experts_gradients
from experts_gradients import Layer, compare, layer

CPU = torch.device("cpu")


@pytest.fixture
def given() -> Layer:
    return layer(24, 2, 8, 32, 16, CPU, torch.float32)


def test_the_three_ways_agree(given: Layer) -> None:
    assert sorted(compare(given, 1)) == ["grouped", "loop", "ours"]


def test_no_figure_counts_for_a_way_that_is_wrong(given: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experts_gradients.WAYS, "ours", lambda given: experts_gradients.ours(given) * 1.001)
    with pytest.raises(SystemExit, match="ours is off"):
        compare(given, 1)
