"""The confidence sequence: false alarms, coverage and detection under continuous looking."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.quality.sequential import (
    AHEAD,
    CHUNK,
    TRUNCATION,
    CanaryComparison,
    MeanSequence,
    Pairing,
    Unit,
    group_sizes,
    least_pairs,
    log_growth,
)

ALPHA = 0.05


def first_crossings(x_SN: np.ndarray, m: float, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """For S streams: when the mean is shown to be above `m`, and below it (inf: never).

    A route of its own to what `MeanSequence` does step by step: cumulative sums over whole streams.
    """
    n_N = np.arange(1, x_SN.shape[1] + 1)
    mean_SN = (0.5 + x_SN.cumsum(1)) / (n_N + 1)
    variance_SN = (0.25 + ((x_SN - mean_SN) ** 2).cumsum(1)) / (n_N + 1)
    first_S1 = np.ones((len(x_SN), 1))
    mean_SN = np.hstack([0.5 * first_S1, mean_SN[:, :-1]])
    variance_SN = np.hstack([0.25 * first_S1, variance_SN[:, :-1]])
    plug_in_SN = np.sqrt(2 * math.log(2 / alpha) / (variance_SN * n_N * np.log1p(n_N)))
    up_SN, down_SN = (
        np.maximum(plug_in_SN, gain_SN / (variance_SN + gain_SN**2)) for gain_SN in (mean_SN - m, m - mean_SN)
    )
    growth = log_growth(x_SN, m, up_SN, down_SN)
    hits = [(part.cumsum(1) >= math.log(2 / alpha)) for part in growth]
    above, below = (np.where(hit.any(1), hit.argmax(1) + 1.0, np.inf) for hit in hits)
    return above, below


def differences(
    chance: np.random.Generator, canary: float, baseline: float, shape: tuple[int, int]
) -> np.ndarray:
    """Scaled reward differences of a canary on 20% of the units: one against the mean of four."""
    canary_SN = chance.random(shape) < canary
    baseline_SN = (chance.random((*shape, 4)) < baseline).mean(axis=-1)
    return (canary_SN - baseline_SN + 1) / 2


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.95])
def test_equal_arms_are_rolled_back_rarely_however_often_one_looks(rate: float) -> None:
    x_SN = differences(np.random.default_rng(1), rate, rate, (2000, 1500))
    _, below = first_crossings(x_SN, 0.5, ALPHA)
    # Measured 0.020 to 0.027: each side holds half of alpha.
    assert np.isfinite(below).mean() <= ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8, 0.95, 0.99])
def test_equal_arms_are_rolled_back_rarely_in_full(rate: float) -> None:
    chance = np.random.default_rng(2)
    hits = []
    for _ in range(10):
        _, below = first_crossings(differences(chance, rate, rate, (1000, 5000)), 0.5, ALPHA)
        hits.append(np.isfinite(below).mean())
    assert np.mean(hits) <= ALPHA


@pytest.mark.parametrize("mean", [0.05, 0.3, 0.5, 0.9])
def test_the_interval_covers_the_mean_at_every_moment(mean: float) -> None:
    chance = np.random.default_rng(3)
    for x_SN in (
        (chance.random((1000, 800)) < mean).astype(float),
        chance.beta(4 * mean, 4 - 4 * mean, (1000, 800)),
    ):
        above, below = first_crossings(x_SN, mean, ALPHA)
        assert (np.isfinite(above) | np.isfinite(below)).mean() <= ALPHA


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_short_streams_by_exact_enumeration(rate: float, alpha: float) -> None:
    """Add the probabilities of all ternary streams that ever reject a mean which is true."""
    chances = {0.0: rate * (1 - rate), 0.5: rate**2 + (1 - rate) ** 2, 1.0: rate * (1 - rate)}
    wrong = 0.0
    for stream in itertools.product(chances, repeat=9):
        if _rejects(stream, 0.5, alpha):
            wrong += math.prod(chances[x] for x in stream)
    assert wrong <= alpha
    # A rule that never rejects would pass as well.
    assert _rejects((0.0,) * 9, 0.5, alpha)


def _rejects(stream: tuple[float, ...], m: float, alpha: float) -> bool:
    """The hedged capital process in plain arithmetic, written from the paper."""
    above = below = 0.5
    total, squares = 0.5, 0.25
    for n, x in enumerate(stream, start=1):
        mean, variance = total / n, squares / n
        plug_in = math.sqrt(2 * math.log(2 / alpha) / (variance * n * math.log(1 + n)))
        up = max(plug_in, (mean - m) / (variance + (mean - m) ** 2))
        down = max(plug_in, (m - mean) / (variance + (m - mean) ** 2))
        above *= 1 + min(up, TRUNCATION / m) * (x - m)
        below *= 1 - min(down, TRUNCATION / (1 - m)) * (x - m)
        if max(above, below) >= 1 / alpha:
            return True
        total += x
        squares += (x - total / (n + 1)) ** 2
    return False


@pytest.mark.parametrize(("canary", "baseline"), [(0.0, 0.95), (0.9, 0.9), (0.95, 0.2), (0.6, 0.8)])
def test_the_sequence_agrees_with_the_vectorised_route(canary: float, baseline: float) -> None:
    x_SN = differences(np.random.default_rng(4), canary, baseline, (5, 300))
    above, below = first_crossings(x_SN, 0.5, ALPHA)
    for x_N, up, down in zip(x_SN, above, below, strict=True):
        sequence = MeanSequence(ALPHA, 0.5, 0.5)
        crossed = [math.inf, math.inf]
        for n, x in enumerate(x_N, start=1):
            sequence.add(float(x))
            assert (sequence.is_above, sequence.is_below) == (sequence.lower >= 0.5, sequence.upper <= 0.5)
            crossed[0] = min(crossed[0], n if sequence.is_above else math.inf)
            crossed[1] = min(crossed[1], n if sequence.is_below else math.inf)
        assert crossed == [up, down]


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 60))
def test_the_interval_is_the_same_whenever_it_is_asked_for_and_only_shrinks(
    stream: list[float], every: int
) -> None:
    whole, asked = MeanSequence(ALPHA, 0.3, 0.6), MeanSequence(ALPHA, 0.3, 0.6)
    whole.update(stream)
    lower, upper = 0.0, 1.0
    for n, x in enumerate(stream, start=1):
        asked.add(x)
        if n % every == 0:
            assert lower <= asked.lower
            assert asked.upper <= upper
            lower, upper = asked.lower, asked.upper
    assert (asked.lower, asked.upper, asked.n) == (whole.lower, whole.upper, whole.n)


def test_a_stream_of_many_chunks_gives_the_same_interval() -> None:
    x_N = np.random.default_rng(8).random(3 * CHUNK + 7)
    whole, asked = MeanSequence(ALPHA), MeanSequence(ALPHA)
    whole.update(x_N)
    for x in x_N:
        asked.add(x)
        _ = asked.lower
    assert (asked.lower, asked.upper) == (whole.lower, whole.upper)


@given(st.lists(st.floats(-1, 1), max_size=200), st.floats(0, 1), st.floats(-0.2, 0.4))
@example([0.0], 1.0, 0.0)
def test_the_limits_and_the_interval_agree(stream: list[float], margin: float, below: float) -> None:
    """No candidate beyond a limit is rejected before the limit is: the bets are the same for all."""
    sequence = MeanSequence(ALPHA, (1 - margin) / 2, (1 + below) / 2)
    for x in stream:
        sequence.add((x + 1) / 2)
        # With a margin of 1 the limit is the range's end, where the interval begins: none lies beyond.
        assert margin == 1 or sequence.is_above == (sequence.lower >= (1 - margin) / 2)
        assert sequence.is_below == (sequence.upper <= (1 + below) / 2)


def test_the_interval_closes_in_on_the_mean() -> None:
    x_N = np.random.default_rng(5).beta(2, 6, 20_000)
    sequence = MeanSequence(ALPHA)
    sequence.update(x_N)
    assert sequence.lower < 0.25 < sequence.upper
    assert sequence.upper - sequence.lower < 0.02


def units(rewards: np.ndarray, is_canary: bool, step: int = 0) -> list[Unit]:
    return [Unit(step, "k", is_canary, float(reward)) for reward in rewards]


def mixed(canary_N: np.ndarray, baseline_N: np.ndarray, group: int = 4) -> list[Unit]:
    """A unit of the canary, then `group` of the baseline, and so on."""
    canary, baseline = units(canary_N, True), units(baseline_N, False)
    return [unit for n, one in enumerate(canary) for unit in (one, *baseline[n * group : (n + 1) * group])]


def pairs_until(canary: float, baseline: float, verdict: str) -> list[int]:
    chance = np.random.default_rng(6)
    found = []
    for _ in range(60):
        comparison = CanaryComparison({0: 0.2}, ALPHA, above=-0.1, below=0.0)
        canary_N = (chance.random(400) < canary).astype(float)
        baseline_N = (chance.random(1600) < baseline).astype(float)
        for unit in mixed(canary_N, baseline_N):
            comparison.add(unit)
            if comparison.is_below if verdict == "rollback" else comparison.is_above:
                found.append(comparison.pairs)
                break
    assert len(found) >= 55
    return found


def test_a_total_failure_shows_within_ten_pairs() -> None:
    # Measured: 7 in the median, 8 at worst.
    assert max(pairs_until(0.0, 0.95, "rollback")) <= 10


def test_an_equal_canary_is_cleared_within_a_hundred_pairs_in_the_median() -> None:
    # Measured: 66 in the median.
    assert np.median(pairs_until(0.95, 0.95, "promote")) <= 100


def test_a_clearly_better_canary_is_cleared_at_once() -> None:
    assert max(pairs_until(0.95, 0.2, "promote")) <= 15


def test_pairing_follows_the_weight() -> None:
    sizes = {0.05: (1, 19), 0.1: (1, 9), 0.2: (1, 4), 0.25: (1, 3), 0.5: (1, 1), 0.9: (9, 1), 0.95: (19, 1)}
    found = {weight: group_sizes(weight) for weight in sizes}
    assert {weight: (size[True], size[False]) for weight, size in found.items()} == sizes


def test_only_whole_pairs_count_and_each_once() -> None:
    comparison = CanaryComparison({0: 0.2}, ALPHA, above=-0.1, below=0.0)
    for unit in mixed(np.array([1.0, 0.0, 1.0]), np.ones(11)):
        comparison.add(unit)
    assert comparison.pairs == 2
    by_hand = MeanSequence(ALPHA, 0.45, 0.5)
    by_hand.update([0.5, 0.0])
    bounds = 2 * by_hand.lower - 1, 2 * by_hand.upper - 1
    assert (comparison.lower, comparison.upper) == pytest.approx(bounds)


def test_a_unit_counts_with_its_mean_when_its_pair_is_complete() -> None:
    pairing, one = Pairing({0: 0.5}), Unit(0, "k", True, 1.0)
    assert pairing.add(one) is None
    one.total, one.count = 1.5, 3
    assert pairing.add(Unit(0, "k", False, 0.25)) == 0.25


def test_an_arm_that_is_ahead_is_compared_with_its_newest_units() -> None:
    """The canary is rated only after 1,000 units of the baseline, which has meanwhile become worse."""
    pairing = Pairing({0: 0.2})
    assert not any(map(pairing.add, units(np.ones(1000), False)))
    assert not any(map(pairing.add, units(np.zeros(4 * AHEAD), False)))
    assert pairing.add(Unit(0, "k", True, 0.0)) == 0.0


def test_units_of_two_steps_are_never_compared() -> None:
    pairing = Pairing({1: 0.5, 2: 0.5})
    assert pairing.add(Unit(1, "k", True, 1.0)) is None
    assert pairing.add(Unit(2, "k", False, 0.0)) is None
    assert pairing.add(Unit(2, "k", True, 0.5)) == 0.5


def test_the_capital_multiplies_over_steps() -> None:
    """Two steps of five pairs each show what neither shows alone."""
    arms = [unit for step in (1, 2) for _ in range(5) for unit in _pair(step)]
    comparison = CanaryComparison({1: 0.5, 2: 0.5}, ALPHA, above=-0.1, below=0.0)
    for unit in arms[:10]:
        comparison.add(unit)
    assert not comparison.is_below
    for unit in arms[10:]:
        comparison.add(unit)
    assert comparison.is_below


def _pair(step: int) -> tuple[Unit, Unit]:
    return Unit(step, "k", True, 0.0), Unit(step, "k", False, 1.0)


@pytest.mark.parametrize("margin", [0.02, 0.05, 0.1, 0.3, 0.7, 1.0])
def test_arms_that_never_differ_are_cleared_after_the_least_pairs(margin: float) -> None:
    sequence = MeanSequence(ALPHA, above=(1 - margin) / 2)
    while not sequence.is_above:
        sequence.add(0.5)
    assert sequence.n == least_pairs(ALPHA, margin)


def test_a_margin_of_one_is_met_by_all_but_a_total_failure() -> None:
    """It is allowed: the rewards then only roll a canary back."""
    failing, hardly_better = (MeanSequence(ALPHA, above=0.0) for _ in range(2))
    failing.update([0.0] * 1000)
    hardly_better.update([0.05] * 1000)
    assert (failing.is_above, hardly_better.is_above) == (False, True)


def test_a_margin_of_nothing_is_never_met() -> None:
    assert least_pairs(ALPHA, 0.0) == least_pairs(ALPHA, 1e-9) == math.inf


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan])
def test_values_outside_zero_and_one_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="lie in"):
        MeanSequence(ALPHA).update([0.5, value])
