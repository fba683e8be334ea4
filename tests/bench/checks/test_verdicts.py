"""Verdicts of benchmarks: how often an interval is wrong, what few pairs show, and how a run ends."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import islice
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.helpers.bench_files import load


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("_verdicts", monkeypatch)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("_run", monkeypatch)
    # A copy, so that a test does not change what the next one imports.
    monkeypatch.setattr(module, "SAYS_S", 0.0)
    return module


def test_the_capital_is_the_integral_that_it_says(verdicts: ModuleType):
    p = (np.arange(200_000) + 0.5) / 400_000 + 0.5
    for count, above in ((1, 1), (3, 1), (7, 5), (12, 9)):
        uniform = float(np.mean((2 * p) ** above * (2 - 2 * p) ** (count - above)))
        wanted = (uniform + 2**count * (above == count)) / 2
        assert float(Fraction(*verdicts.evidence(count, above))) == pytest.approx(wanted, rel=1e-6)


def test_over_all_streams_a_side_is_wrong_with_at_most_half_of_alpha(verdicts: ModuleType):
    """Exact, for values on either side of the median by a fair coin: the walk's chance to be stopped."""
    alpha, wrong = 0.05, 0.0
    chances = {0: 1.0}
    for stop in islice(verdicts.needed(alpha), 300):
        moved: dict[int, float] = {}
        for above, chance in chances.items():
            for side in (above, above + 1):
                moved[side] = moved.get(side, 0.0) + chance / 2
        wrong += sum(chance for above, chance in moved.items() if above >= stop)
        chances = {above: chance for above, chance in moved.items() if above < stop}
    assert 0.015 < wrong <= alpha / 2


def test_simulated_ratios_keep_their_median_in_the_interval(verdicts: ModuleType):
    chance = np.random.default_rng(1)
    wrong = 0
    for _ in range(1000):
        # Ratios without a mean, and a spread that changes with what was seen.
        found, last = verdicts.MedianInterval(), 1.0
        for draw in chance.standard_cauchy(40):
            last = 1.3 * math.exp(float(np.clip(draw * (1.0 if last > 1.3 else 0.1), -50, 50)))
            found.add(last)
        now = found.now()
        wrong += not now.lower <= 1.3 <= now.upper
    assert wrong / 1000 <= 0.05


def test_six_pairs_that_agree_decide_and_five_do_not(verdicts: ModuleType):
    # By hand, against 2 / 0.05 = 40: (64 + 127 / 7) / 2 = 41.07 for six of six, (32 + 63 / 6) / 2 = 21.25.
    assert Fraction(*verdicts.evidence(6, 6)) == Fraction(64 + Fraction(127, 7)) / 2
    assert list(islice(verdicts.needed(0.05), 7)) == [2, 3, 4, 5, 6, 6, 7]
    five = verdicts.MedianInterval([0.9, 0.5, 0.7, 0.8, 0.6]).now()
    assert (five.lower, five.upper) == (-math.inf, math.inf)
    six = verdicts.MedianInterval([0.9, 0.5, 0.7, 0.8, 0.6, 0.95]).now()
    assert six == verdicts.Interval(0.5, 0.95, 6)
    limits = ((-math.inf, 1.0), (-math.inf, 0.4), (-math.inf, 0.7), (0.5, math.inf), (1.0, math.inf))
    says = [six.says(*limit) for limit in limits]
    assert says == ["met", "missed", "undecided", "met", "missed"]


def test_an_empty_interval_decides_nothing(verdicts: ModuleType):
    drifted = verdicts.MedianInterval([1.0] * 20 + [2.0] * 400).now()
    assert drifted.lower > drifted.upper
    assert drifted.says(-math.inf, 1.5) == "undecided"
    with pytest.raises(ValueError, match="not a number"):
        verdicts.MedianInterval([math.nan])


def test_pairs_end_as_soon_as_every_bound_is_decided(run: ModuleType, monkeypatch: pytest.MonkeyPatch):
    record = load("_record", monkeypatch)
    bounds = {"ratio": record.at_most(1.2), "other": record.at_least(2.0), "free": record.at_least()}

    def take(number: int) -> dict[str, float]:
        return {"ratio": 1.0, "other": 1.0 + number % 2 * 1e-3, "free": float(number)}

    found = run.Run("one", False).pairs("pair", take, bounds, suffix=".base")
    assert len(found["ratio"]) == 6
    assert found["free"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(run.Run("one", True).pairs("pair", take, bounds)["ratio"]) == run.LEAST_LONG
    assert len(run.Run("one", False).pairs("pair", take, bounds, most=3)["ratio"]) == 3


def test_a_part_keeps_to_its_time(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """By a clock of the test: how many turns fit is no matter of pauses of the machine."""
    now, waited = [1000.0], list[int]()
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = run.Run("one", False, minutes=2)

    def turn(number: int) -> int:
        now[0] += 10
        return number

    def too_long(number: int) -> None:
        time.sleep(30)
        now[0] += 30
        waited.append(number)

    assert one.repeats("turn", turn, share=0.5) == [0, 1, 2, 3, 4]
    # A second before the end, which a real timer keeps.
    now[0] = 1119.0
    assert one.repeats("too long", too_long) == []
    assert waited == []
    assert not one.is_interrupted
    assert "ends by" in capsys.readouterr().out


def test_few_readings_of_a_share_decide_nothing(verdicts: ModuleType):
    """49 of 50, and 0 faults of 50, say little of bounds of 94% and 5%; so does one round of a mean."""
    assert verdicts.share_interval([1.0] * 49 + [0.0]).says(0.94, 1.0) == verdicts.UNDECIDED
    assert verdicts.share_interval([1.0] * 980 + [0.0] * 20).says(0.94, 1.0) == verdicts.MET
    none = verdicts.share_interval([0.0] * 50)
    # With p at its upper end, nothing in 50 has a chance of 2.5%.
    assert (1 - none.upper) ** 50 == pytest.approx(0.025)
    assert none.says(0.0, 0.05) == verdicts.UNDECIDED
    assert verdicts.mean_interval([0.995]).says(0.0, 0.99) == verdicts.UNDECIDED


def test_the_interval_of_a_mean_is_as_often_wrong_as_it_says(verdicts: ModuleType):
    random = np.random.default_rng(0)
    rounds = random.normal(0.5, 0.1, (2000, 5))
    held = [one.lower <= 0.5 <= one.upper for one in map(verdicts.mean_interval, rounds.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Press it, also in a process that a shell has started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield partial(signal.raise_signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_run_with_what_it_has(run: ModuleType, ctrl_c: Callable[[], None]):
    one = run.Run("one", False)

    def take(number: int) -> int:
        if number == 2:
            ctrl_c()
        return number

    assert one.repeats("turn", take) == [0, 1]
    assert one.is_interrupted
    assert one.repeats("next part", take) == []


def test_ctrl_c_before_a_part_ends_a_run_with_what_it_has(run: ModuleType, ctrl_c: Callable[[], None]):
    one = run.Run("one", False)
    assert one.repeats("turn", lambda number: number, most=1) == [0]
    with one.preparing():
        ctrl_c()
        raise AssertionError
    assert one.parts(lambda: 1) == []
