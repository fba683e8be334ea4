"""Intervals: coverage by exact enumeration and simulation, and the textbook's own definition."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq

from engine.quality.estimate import clopper_pearson, interval, paired_difference


def tail_at_least(successes, trials, p):
    return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1))


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (1, 200), (147, 200)])
def test_the_bounds_are_where_the_binomial_tails_are_half_alpha(successes, trials):
    low, high = clopper_pearson(successes, trials)
    if successes:
        assert low == pytest.approx(
            brentq(lambda p: tail_at_least(successes, trials, p) - 0.025, 0, 1), abs=1e-9
        )
    else:
        assert low == 0.0
    if successes < trials:
        expected = brentq(lambda p: 1 - tail_at_least(successes + 1, trials, p) - 0.025, 0, 1)
        assert high == pytest.approx(expected, abs=1e-9)
    else:
        assert high == 1.0


@pytest.mark.parametrize("trials", [1, 5, 20, 60])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_coverage_of_proportions_is_at_least_nominal_for_every_p(trials, alpha):
    bounds = [clopper_pearson(k, trials, alpha) for k in range(trials + 1)]
    worst = min(
        sum(
            math.comb(trials, k) * p**k * (1 - p) ** (trials - k)
            for k, (low, high) in enumerate(bounds)
            if low <= p <= high
        )
        for p in np.linspace(0, 1, 401)
    )
    assert worst >= 1 - alpha


def test_zeros_and_ones_take_the_exact_interval():
    assert interval([1.0] * 30 + [0.0] * 10) == clopper_pearson(30, 40)
    assert interval([]) == (0.0, 1.0)


@pytest.mark.parametrize("support", [(0.0, 0.25, 1.0), (0.4, 0.5, 0.6)])
def test_coverage_of_partial_scores_by_enumeration_of_every_sample(support):
    weights = (0.2, 0.5, 0.3)
    mean = float(np.dot(support, weights))
    covered = 0.0
    for sample in itertools.product(range(3), repeat=6):
        low, high = interval([support[k] for k in sample], alpha=0.3)
        if low <= mean <= high:
            covered += math.prod(weights[k] for k in sample)
    assert covered >= 0.7


def test_coverage_of_partial_scores_by_simulation():
    random, mean, hits = np.random.default_rng(1), 2 / 7, 0
    for _ in range(100):
        low, high = interval(random.beta(2, 5, size=120).tolist(), alpha=0.1)
        hits += low <= mean <= high
    # 90 expected at least; 82 is three standard deviations below.
    assert hits >= 82


def test_a_paired_difference_covers_and_names_the_better_one():
    random, hits, found = np.random.default_rng(2), 0, 0
    for _ in range(60):
        base = (random.random(200) < 0.3).astype(float)
        better = np.where(random.random(200) < 0.5, 1.0, base)
        result = paired_difference(better.tolist(), base.tolist())
        hits += result.low <= 0.35 <= result.high
        found += result.low > 0
        assert result.mean == pytest.approx(float(better.mean() - base.mean()))
    assert hits >= 54
    assert found == 60


def test_swapping_the_sides_mirrors_the_interval():
    first, second = [1.0, 0.0, 1.0, 1.0] * 20, [0.0, 0.0, 1.0, 0.0] * 20
    one, other = paired_difference(first, second), paired_difference(second, first)
    assert (one.mean, one.low, one.high) == pytest.approx((-other.mean, -other.high, -other.low))


def test_agreement_narrows_a_paired_difference():
    base = [1.0, 0.0] * 100
    near = [*base[:-2], 1.0, 1.0]
    wide = paired_difference([0.0, 1.0] * 100, base)
    close = paired_difference(near, base)
    assert close.high - close.low < (wide.high - wide.low) / 2
