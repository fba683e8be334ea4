"""What the benchmarks of cold adapters compute from answers: which requests count, and when they are red."""

import math
import mmap
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.bench_files import load

TOKENS = (1, 2)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("_traffic", monkeypatch)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("_storm_figures", monkeypatch)


def answer(traffic: ModuleType, at: float, ttft: float, burst: bool = False, **changed):
    ask = traffic.Ask(at, "model", (7, 8), len(TOKENS), burst)
    return replace(traffic.Answer(ask, at, at + ttft, at + ttft + 0.1, 200, 0, TOKENS, ""), **changed)


def phase(traffic: ModuleType, warm: dict[float, float], burst: list[float], start: float = 1.0) -> list:
    """Warm requests by arrival with their time to the first token, and a burst at `start`."""
    found = [answer(traffic, at, ttft) for at, ttft in warm.items()]
    return found + [answer(traffic, start, ttft, burst=True) for ttft in burst]


def test_requests_count_from_the_first_cold_arrival_to_the_last_cold_first_token(traffic, counts):
    # The same arrivals in both arms; the control's burst is over at 1.5, the storm's at 3.
    storm = phase(traffic, {0.5: 9.0, 1.0: 0.2, 2.0: 0.4, 3.0: 0.6, 3.1: 9.0}, [0.5, 2.0])
    control = phase(traffic, {0.5: 9.0, 1.0: 0.1, 2.0: 0.2, 3.0: 0.3, 3.1: 9.0}, [0.5, 0.5])
    calm = [answer(traffic, at, 0.15) for at in (0.0, 1.0)]
    one = counts.Alternation(storm, control, calm)
    assert one.counted() == tuple(map(pytest.approx, ([0.2, 0.4, 0.6], [0.1, 0.2, 0.3])))
    arms = counts.Arms([one, one])
    values, spreads = arms.figures()
    assert arms.counted == values["counted"] == 6
    assert arms.pairs() == {"ratio": [pytest.approx(2.0)] * 2, "ready_over_warm": [pytest.approx(4.0)] * 2}
    assert values["over_calm"] == pytest.approx(4.0)
    assert values["control_over_calm"] == pytest.approx(2.0)
    assert values["longest_cold_s"] == pytest.approx(2.0)
    assert spreads["over_calm"] == "4..4"


def test_a_request_without_a_first_token_is_the_slowest(traffic, counts):
    lost = answer(traffic, 1.0, 0.0, first=0.0, status=500, ids=(), fault="gone")
    assert lost.ttft == math.inf
    short = answer(traffic, 1.0, 0.1, ids=(1,))
    again = answer(traffic, 1.0, 0.1, refused=3)
    assert [one.is_right for one in (lost, short, again)] == [False, False, True]
    assert counts.errors([lost, short, again]) == 2
    assert counts.refusals([lost, short, again]) == 3


def test_an_unequal_pair_is_red(traffic, counts):
    storm, control = phase(traffic, {1.0: 0.2}, [0.5]), phase(traffic, {1.0: 0.2}, [0.5])
    assert counts.faults("b", counts.Arms([counts.Alternation(storm, control, [])])) == []
    other = counts.Arms([counts.Alternation(storm, control[1:], [])])
    assert counts.faults("b", other) == ["b: a storm and its control were not the same requests."]


def test_a_storm_that_outlives_its_traffic_counts_and_several_are_red(traffic, counts):
    storm, control = phase(traffic, {1.0: 0.2}, [0.5]), phase(traffic, {1.0: 0.2}, [0.7])
    within = counts.Alternation(storm, control, [], 0.8)
    beyond = counts.Alternation(storm, control, [], 0.6)
    assert (within.seconds, within.outlived_traffic, beyond.outlived_traffic) == (
        pytest.approx(0.7),
        False,
        True,
    )
    once, twice = counts.Arms([within, beyond]), counts.Arms([within, beyond, beyond])
    assert (once.counted, once.outlived, counts.faults("b", once)) == (2, 1, [])
    said = "b: 2 alternations lasted longer than their warm traffic."
    assert counts.faults("b", twice) == [said]


def test_an_adapter_that_starves_is_red(traffic, counts):
    def one(*waits: float):
        warm, calm = {1.0: 0.2}, [answer(traffic, 0.0, 0.1)]
        return counts.Alternation(phase(traffic, warm, list(waits)), phase(traffic, warm, [0.5, 0.5]), calm)

    fair, starved = one(0.1, 0.5), one(0.1, 1.6)
    assert counts.faults("b", counts.Arms([fair, fair, one(0.1, 1.4)])) == []
    said = "b: a cold adapter starved: it waited 1.60 s, and a storm 0.50 s in the median."
    assert counts.faults("b", counts.Arms([fair, fair, starved])) == [said]
    values, _ = counts.Arms([fair, fair, starved]).figures()
    assert values["longest_cold_over_window"] == pytest.approx(3.2)


def test_answers_are_compared_up_to_where_they_part(monkeypatch: pytest.MonkeyPatch, traffic):
    answers = load("_answers", monkeypatch)
    one = answer(traffic, 0.0, 0.1, logprobs=(-1.0, -2.0))
    assert answers.off_nats(one, one) == 0
    parted = answer(traffic, 0.0, 0.1, ids=(3, 2), logprobs=(-1.25, -9.0))
    assert answers.off_nats(one, parted) == pytest.approx(0.25)
    later = answer(traffic, 0.0, 0.1, ids=(1, 9), logprobs=(-1.0, -2.5))
    assert answers.off_nats(one, later) == pytest.approx(0.5)
    for broken in (answer(traffic, 0.0, 0.1), answer(traffic, 0.0, 0.1, status=500, logprobs=(-1.0, -2.0))):
        assert answers.off_nats(one, broken) == math.inf
    # What differs from another model's by a token is unlike it, however likely that model finds its own.
    near = answer(traffic, 0.0, 0.1, ids=(3, 2), logprobs=(-1.05, -9.0))
    found = answers.check_of(one, near, near, one)
    assert (found.alone, found.base, found.other) == (pytest.approx(0.05), math.inf, 0)


def test_answers_that_are_not_their_adapters_are_red(monkeypatch: pytest.MonkeyPatch):
    answers = load("_answers", monkeypatch)
    own = answers.Check(alone=0.0, base=1.0, other=1.0)
    assert answers.faults("b", [own] * 4, 0.01, 1.0) == []
    assert answers.faults("b", [], 0.01, 1.0) == ["b: no answer was compared."]
    wrong = answers.Check(alone=0.5, base=1.0, other=1.0)
    assert answers.faults("b", [own] * 3 + [wrong], 0.01, 0.75) == []
    assert answers.faults("b", [own] * 3 + [wrong], 0.01, 1.0) == [
        "b: only 75% of answers are within 0.01 nats of those that their adapters give alone."
    ]
    # Nothing applied, and always the same adapter applied: both agree with themselves.
    bare, same = answers.Check(0.0, 0.0, 1.0), answers.Check(0.0, 1.0, 0.0)
    assert answers.faults("b", [own, bare], 0.01, 1.0) == ["b: only 50% of answers differ from the base's."]
    assert answers.faults("b", [same], 0.01, 1.0) == ["b: only 0% of answers differ from another adapter's."]


def test_memory_that_grows_with_names_is_red(monkeypatch: pytest.MonkeyPatch):
    flat = load("_flat", monkeypatch)
    memory = flat.Memory()
    for count in range(1000, 101_000, 1000):
        memory.names.append(count)
        # One fills a cache first, one wanders, one keeps 80 bytes of every name.
        for name, value in {
            "fills": min(count, 20_000) * 2000,
            "wanders": 10**8 + (count % 7000) * 500,
            "keeps": 10**8 + 80 * count,
        }.items():
            memory.bytes.setdefault(name, []).append(value)
    assert memory.growing() == {"keeps": pytest.approx(80)}


def test_the_page_cache_of_a_file_is_counted_in_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    density, made = load("_density", monkeypatch), load("_made", monkeypatch)
    file = tmp_path / "file"
    file.write_bytes(b"x" * (5 * mmap.PAGESIZE - 1))
    assert density.cached_bytes([file]) == 5 * mmap.PAGESIZE
    assert density.cached_bytes([tmp_path / "file", tmp_path / "file"]) == 10 * mmap.PAGESIZE
    if density.filesystem(file) == "tmpfs":
        with pytest.raises(RuntimeError, match="is on tmpfs"):
            density.drop([file])
        return
    density.drop([file])
    assert density.cached_bytes([file]) == 0
    file.read_bytes()
    monkeypatch.setattr(made, "drop_cache", lambda paths: None)
    monkeypatch.setattr(density, "_made", made)
    with pytest.raises(RuntimeError, match=f"{5 * mmap.PAGESIZE}.*page cache"):
        density.drop([file])
