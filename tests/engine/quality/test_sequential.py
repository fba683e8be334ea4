"""The confidence sequence: false alarms, coverage and detection under continuous looking."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quality.sequential import (
    AHEAD,
    TRUNCATION,
    CanaryComparison,
    MeanSequence,
    Pairing,
    Unit,
    group_sizes,
    log_growth,
    plug_in_bet,
)

ALPHA = 0.05


def first_crossings(x_SN: np.ndarray, m: float, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """For S streams: when the mean is shown to be above `m`, and below it (inf: never).

    A route of its own to what `MeanSequence` does step by step: cumulative sums over whole streams.
    """
    n_N = np.arange(1, x_SN.shape[1] + 1)
    mean_SN = (0.5 + x_SN.cumsum(1)) / (n_N + 1)
    variance_SN = (0.25 + ((x_SN - mean_SN) ** 2).cumsum(1)) / (n_N + 1)
    before_SN = np.hstack([np.full((len(x_SN), 1), 0.25), variance_SN[:, :-1]])
    growth = log_growth(x_SN, m, plug_in_bet(before_SN, n_N, alpha))
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
        bet = math.sqrt(2 * math.log(2 / alpha) / (squares / n * n * math.log(1 + n)))
        above *= 1 + min(bet, TRUNCATION / m) * (x - m)
        below *= 1 - min(bet, TRUNCATION / (1 - m)) * (x - m)
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
        sequence = MeanSequence(ALPHA)
        crossed = [math.inf, math.inf]
        for n, x in enumerate(x_N, start=1):
            sequence.update(np.array([x]))
            crossed[0] = min(crossed[0], n if sequence.lower >= 0.5 else math.inf)
            crossed[1] = min(crossed[1], n if sequence.upper <= 0.5 else math.inf)
        assert crossed == [up, down]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 60))
def test_pieces_of_any_size_give_the_same_interval_and_it_only_shrinks(stream: list[float], cut: int) -> None:
    whole, pieces = MeanSequence(ALPHA), MeanSequence(ALPHA)
    whole.update(np.array(stream))
    lower, upper = 0.0, 1.0
    for start in range(0, len(stream), cut):
        pieces.update(np.array(stream[start : start + cut]))
        assert lower <= pieces.lower
        assert pieces.upper <= upper
        lower, upper = pieces.lower, pieces.upper
    assert (pieces.lower, pieces.upper, pieces.n) == (whole.lower, whole.upper, whole.n)


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
        comparison = CanaryComparison({0: 0.2}, alpha=ALPHA, margin=0.1)
        canary_N = (chance.random(400) < canary).astype(float)
        baseline_N = (chance.random(1600) < baseline).astype(float)
        for unit in mixed(canary_N, baseline_N):
            comparison.update([unit])
            if comparison.upper <= 0 if verdict == "rollback" else comparison.lower >= -0.1:
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
    comparison = CanaryComparison({0: 0.2}, ALPHA, 0.1)
    comparison.update(mixed(np.array([1.0, 0.0, 1.0]), np.ones(11)))
    assert comparison.pairs == 2
    by_hand = MeanSequence(ALPHA, also=(0.45, 0.5, 0.55))
    by_hand.update(np.array([0.5, 0.0]))
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
    comparison = CanaryComparison({1: 0.5, 2: 0.5}, ALPHA, 0.1)
    comparison.update(arms[:10])
    assert comparison.upper > 0
    comparison.update(arms[10:])
    assert comparison.upper <= 0


def _pair(step: int) -> tuple[Unit, Unit]:
    return Unit(step, "k", True, 0.0), Unit(step, "k", False, 1.0)


def test_the_limits_alone_give_the_same_verdicts() -> None:
    chance = np.random.default_rng(7)
    for canary in (0.2, 0.8, 0.95):
        full = CanaryComparison({0: 0.5}, ALPHA, 0.1)
        limits = CanaryComparison({0: 0.5}, ALPHA, 0.1, only_limits=True)
        for _ in range(300):
            pair = Unit(0, "k", True, chance.random() < canary), Unit(0, "k", False, chance.random() < 0.8)
            full.update(pair)
            limits.update(pair)
            assert (full.upper <= 0, full.lower >= -0.1, full.upper <= 0.1) == (
                limits.upper <= 0,
                limits.lower >= -0.1,
                limits.upper <= 0.1,
            )


@pytest.mark.parametrize("margin", [0.02, 0.05, 0.1, 0.3, 0.7])
def test_a_limit_that_is_met_exactly_is_met(margin: float) -> None:
    for canary, baseline, bound in ((1.0, 0.0, "lower"), (0.0, 1.0, "upper")):
        comparison = CanaryComparison({0: 0.5}, ALPHA, margin, only_limits=True)
        for _ in range(100):
            comparison.update([Unit(0, "k", True, canary), Unit(0, "k", False, baseline)])
        assert getattr(comparison, bound) == (margin if bound == "lower" else -margin)


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan])
def test_values_outside_zero_and_one_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="lie in"):
        MeanSequence(ALPHA).update(np.array([0.5, value]))
