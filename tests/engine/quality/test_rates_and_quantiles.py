"""Rates and quantiles: false alarms by exact enumeration, agreement with integrals, and detection."""

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
from scipy import integrate, stats

from engine.quality.quantiles import PRIOR, QuantileSequence, log_mixture
from engine.quality.rates import RATIOS, log_evidence


@pytest.mark.parametrize("weight", [0.01, 0.2, 0.5])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_rates_that_are_no_higher_are_rarely_alarmed_by_exact_enumeration(
    weight: float, ratio: float
) -> None:
    """Walk the lattice of (canary, baseline) faults; add the probability of ever reaching 1 / alpha."""
    alpha, faults = 0.05, 60
    share = weight * ratio / (1 - weight + weight * ratio)
    alive, alarmed = {(0, 0): 1.0}, 0.0
    for _ in range(faults):
        following: dict[tuple[int, int], float] = {}
        for (canary, baseline), chance in alive.items():
            for step, part in (((canary + 1, baseline), share), ((canary, baseline + 1), 1 - share)):
                following[step] = following.get(step, 0.0) + chance * part
        alive = {}
        for counts, chance in following.items():
            if log_evidence({weight: counts}) >= math.log(1 / alpha):
                alarmed += chance
            else:
                alive[counts] = chance
    assert sum(alive.values()) + alarmed == pytest.approx(1)
    assert alarmed <= alpha
    assert log_evidence({weight: (faults, 0)}) >= math.log(1 / alpha), "it can alarm"


def test_the_evidence_is_the_mean_of_likelihood_ratios_over_all_steps() -> None:
    faults = {0.05: (2, 9), 0.25: (3, 1)}
    total = 0.0
    for ratio in RATIOS:
        product = 1.0
        for weight, (canary, baseline) in faults.items():
            share = weight * ratio / (1 - weight + weight * ratio)
            both = canary + baseline
            product *= stats.binom.pmf(canary, both, share) / stats.binom.pmf(canary, both, weight)
        total += product / len(RATIOS)
    assert log_evidence(faults) == pytest.approx(math.log(total))


def test_five_faults_of_the_canary_alone_are_enough() -> None:
    needed = math.log(1 / (0.025 / 6))
    assert log_evidence({0.2: (5, 0)}) > needed
    assert log_evidence({0.2: (2, 8)}) < 0
    assert log_evidence({}) == pytest.approx(0)


def compatible_ranks(n: int, p: float, alpha: float) -> tuple[int, int]:
    """The least and the most of n observations that may lie below the quantile, by trying all."""
    inside = [k for k in range(n + 1) if log_mixture(k, n, p) < math.log(1 / alpha)]
    return inside[0], inside[-1]


def bounds(values: Iterable[float], p: float, alpha: float) -> tuple[float, float]:
    sequence = QuantileSequence(p, alpha)
    for value in values:
        sequence.add(value)
    return sequence.lower, sequence.upper


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_ranks_cover_by_exact_enumeration(p: float) -> None:
    """Walk all counts below the quantile; add the probability of ever leaving the compatible ranks."""
    alpha, longest = 0.1, 150
    limits = cache(lambda n: compatible_ranks(n, p, alpha))
    alive, left = {0: 1.0}, 0.0
    for n in range(1, longest + 1):
        following: dict[int, float] = {}
        for below, chance in alive.items():
            following[below + 1] = following.get(below + 1, 0.0) + chance * p
            following[below] = following.get(below, 0.0) + chance * (1 - p)
        least, most = limits(n)
        left += sum(chance for below, chance in following.items() if not least <= below <= most)
        alive = {below: chance for below, chance in following.items() if least <= below <= most}
    assert left <= alpha
    assert limits(longest)[0] > p * longest / 2, "it says something"


def test_the_mixture_is_the_integral_over_a_beta_distribution() -> None:
    n, p = 40, 0.9

    def evidence(k: int) -> float:
        prior = stats.beta(PRIOR * p, PRIOR * (1 - p))
        return integrate.quad(lambda q: prior.pdf(q) * q**k * (1 - q) ** (n - k), 0, 1)[0] / (
            p**k * (1 - p) ** (n - k)
        )

    for k in range(n + 1):
        assert log_mixture(k, n, p) == pytest.approx(math.log(evidence(k)))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("alpha", [0.3, 0.05, 0.002])
def test_bounds_are_the_observations_at_the_compatible_ranks_after_each_value(p: float, alpha: float) -> None:
    values_N = np.random.default_rng(1).permutation(np.arange(1.0, 301.0)).tolist()
    sequence = QuantileSequence(p, alpha)
    for n, value in enumerate(values_N, start=1):
        sequence.add(value)
        least, most = compatible_ranks(n, p, alpha)
        ordered = sorted(values_N[:n])
        assert sequence.lower == (ordered[least - 1] if least else 0.0)
        assert sequence.upper == (ordered[most] if most < n else math.inf)
    assert bounds([], p, alpha) == (0.0, math.inf)


def test_the_interval_of_a_heavy_tail_covers_its_quantile() -> None:
    chance, truth, missed = np.random.default_rng(2), stats.lomax(1.5).ppf(0.9), 0
    for _ in range(200):
        sequence, is_missed = QuantileSequence(0.9, 0.1), False
        for value in stats.lomax(1.5).rvs(300, random_state=chance):
            sequence.add(value)
            is_missed |= not sequence.lower <= truth <= sequence.upper
        missed += is_missed
    assert missed / 200 <= 0.1
