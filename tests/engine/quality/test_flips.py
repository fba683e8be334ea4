"""Flips by samples: an exact test at any common probability, few false flips, power for clear ones."""

import numpy as np
import pytest
from scipy.stats import binom, fisher_exact

from engine.quality.flips import LEVEL, flips, is_uncertain, p_values

SAMPLES, RUNS = 16, 1000
CHANCES = np.random.default_rng(5).random(60)


@pytest.mark.parametrize("samples", [4, SAMPLES, 31])
def test_the_test_is_exact_at_any_common_probability(samples: int) -> None:
    """Also between the points of the grid at which its size is computed."""
    p = p_values(samples)
    assert np.allclose(p, p.T)
    assert np.allclose(p, p[::-1, ::-1])
    for chance in CHANCES[:40]:
        seen = binom.pmf(np.arange(samples + 1), samples, chance)
        both = np.outer(seen, seen)
        for level in (0.001, 0.01, 0.05, 0.2, 0.5):
            assert both[p <= level].sum() <= level + 1e-6


def test_it_is_never_weaker_than_fishers_test() -> None:
    p = p_values(SAMPLES)
    for first in range(SAMPLES + 1):
        for second in range(first):
            fisher = fisher_exact([[first, second], [SAMPLES - first, SAMPLES - second]]).pvalue
            assert p[first, second] <= fisher + 1e-9
    assert p[12, 5] < LEVEL / 2 < fisher_exact([[12, 5], [4, 11]]).pvalue


def simulated(first: np.ndarray, second: np.ndarray) -> list[list[int]]:
    draws = np.random.default_rng(7).binomial(
        SAMPLES, np.stack([first, second], axis=-1), (RUNS, len(first), 2)
    )
    return [flips(run.tolist(), SAMPLES) for run in draws]


@pytest.mark.parametrize("chance", [0.5, 0.1, None])
def test_equal_revisions_have_no_flips_in_most_runs(chance: float | None) -> None:
    chances = CHANCES if chance is None else np.full(60, chance)
    runs = simulated(chances, chances)
    assert sum(map(bool, runs)) / RUNS <= LEVEL


def test_few_reported_flips_are_false_and_clear_ones_are_found() -> None:
    """A mean hides them: 10 of 60 items rise by as much as 10 fall."""
    first, second = (np.full(60, 0.5) for _ in range(2))
    first[:10], second[:10], first[10:20], second[10:20] = 0.1, 0.9, 0.9, 0.1
    runs = simulated(first, second)
    false = [sum(item >= 20 for item in run) / len(run) if run else 0.0 for run in runs]
    found = [sum(item < 20 for item in run) / 20 for run in runs]
    assert np.mean(false) <= LEVEL
    assert np.mean(found) >= 0.95


def test_the_surest_flip_comes_first() -> None:
    assert flips([(8, 8), (14, 2), (16, 0), (8, 9)], SAMPLES) == [2, 1]
    assert flips([], SAMPLES) == []


def test_an_answer_is_uncertain_where_another_one_is_likely_among_the_samples() -> None:
    assert not is_uncertain([np.log(0.98), np.log(0.97)], SAMPLES)
    assert is_uncertain([np.log(0.98), np.log(0.97)], 32)
    assert is_uncertain([0.0, np.log(0.5)], 2 * SAMPLES)
