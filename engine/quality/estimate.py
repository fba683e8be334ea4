"""Confidence intervals for fixed samples: a suite's mean score, and a difference on the same items.

Clopper-Pearson (1934) when every score is 0 or 1. For other values in [0, 1] the betting confidence sequence
of `engine.quality.sequential`, which covers at every sample size and therefore at this one. Both have at
least nominal coverage for independent items, for any distribution.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from scipy.special import betaincinv

from engine.quality.sequential import MeanSequence
from engine.quality.term_sequence import MeanInterval


def interval(scores: Sequence[float], alpha: float = 0.05) -> tuple[float, float]:
    """Return a (1 - alpha) interval for the mean of scores in [0, 1]; (0, 1) when there are none."""
    if not scores:
        return 0.0, 1.0
    if set(scores) <= {0.0, 1.0}:
        return clopper_pearson(int(sum(scores)), len(scores), alpha)
    sequence = MeanSequence(alpha)
    sequence.update(scores)
    return sequence.lower, sequence.upper


def clopper_pearson(successes: int, trials: int, alpha: float = 0.05) -> tuple[float, float]:
    """Return the exact interval for a proportion: the values that neither tail test at alpha / 2 rejects.

    C. J. Clopper and E. S. Pearson, Biometrika 26 (1934), by quantiles of the beta distribution.
    """
    low = betaincinv(successes, trials - successes + 1, alpha / 2) if successes else 0.0
    high = betaincinv(successes + 1, trials - successes, 1 - alpha / 2) if successes < trials else 1.0
    return float(low), float(high)


def perplexity(scores: Sequence[float]) -> float:
    """Return the perplexity of texts of equal length, given each one's geometric mean token probability."""
    return math.exp(-fmean(math.log(score) for score in scores))


def paired_difference(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> MeanInterval:
    """Return the mean of `first` minus `second`, item by item, with its (1 - alpha) interval.

    Both hold scores in [0, 1] of the same items in the same order. Items with equal scores narrow the
    interval, because the betting sequence adapts to the variance of the differences.
    """
    assert len(first) == len(second) > 0, "paired scores are of the same items"
    differences = [mine - theirs for mine, theirs in zip(first, second, strict=True)]
    sequence = MeanSequence(alpha)
    sequence.update((difference + 1) / 2 for difference in differences)
    return MeanInterval(fmean(differences), 2 * sequence.lower - 1, 2 * sequence.upper - 1)
