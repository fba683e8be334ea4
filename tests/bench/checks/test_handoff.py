"""The benchmark of handoffs takes its paths in turn, and a reload whose answers are wrong is red."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.bench_files import load

RIGHT = list(range(305))


@pytest.fixture
def handoff(monkeypatch: pytest.MonkeyPatch):
    """The benchmark with paths that take no time: each is noted, and ends a second after the one before."""
    module, clock = load("handoff", monkeypatch), itertools.count(1)
    module.taken = []

    def path(name: str, tokens: list[int], ids: list[int]):
        def take(*_):
            module.taken.append(name)
            seconds = float(next(clock))
            return (
                dict.fromkeys(tokens, seconds) if name == "adapter" else (dict.fromkeys(tokens, seconds), ids)
            )

        return take

    lengths = [0, *module.LENGTHS]
    monkeypatch.setattr(module, "adapter_path", path("adapter", lengths, RIGHT))
    monkeypatch.setattr(module, "merged_path", path("merged", lengths, RIGHT))
    monkeypatch.setattr(module, "reload_path", path("reload", [64], RIGHT[:64]))
    monkeypatch.setattr(module, "agreement", lambda *_: 305)
    return module


def bench(handoff):
    engine = SimpleNamespace(base_path=Path("base"))
    return handoff.Bench(engine, SimpleNamespace(), Path("root"), "float32", {"m": (2, 2)})


def test_the_paths_alternate_in_either_order(handoff):
    one = bench(handoff)
    for number in range(3):
        one.round(number)
    there = ["adapter", "merged", "reload"]
    assert handoff.taken == [*there, *there[::-1], *there]


def test_ratios_are_over_the_adapters_path_of_the_same_round(handoff):
    one = bench(handoff)
    # Adapter 1 s, merged 2 s, reload 3 s; then reload 4 s, merged 5 s, adapter 6 s.
    found = [handoff.figures_of(one.round(number)) for number in range(2)]
    assert [each["ratio_64"] for each in found] == [2.0, pytest.approx(5 / 6)]
    assert [each["ratio_reload_64"] for each in found] == [3.0, pytest.approx(4 / 6)]
    assert [each["adapter_s_305"] for each in found] == [1.0, 6.0]
    assert found[0]["tokens_agreed"] == 305


def test_a_reload_that_did_not_take_is_red(handoff, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handoff, "reload_path", lambda *_: ({64: 0.001}, [7] * 64))
    assert handoff.figures_of(bench(handoff).round(0))["tokens_agreed"] == 0


def test_no_two_rounds_share_an_adapter(handoff):
    drawn = [seed for number in range(-1, 5) for seed in handoff.seeds(number)]
    assert len(set(drawn)) == len(drawn) == 6 * (1 + len(handoff.LENGTHS))
