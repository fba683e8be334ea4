"""Which items' success probabilities differ between two revisions, told from K samples of each.

Boschloo's test (1970) for each item: Fisher's exact p-value as a statistic, whose own tail probability is
the largest over all common success probabilities. It is exact, and never weaker than Fisher's test. Then
Benjamini and Hochberg (1995) choose the items: of the reported flips at most `LEVEL` are false in
expectation, and where no probability differs, any flip is reported with at most that probability. Items are
sampled independently.
"""

from collections.abc import Sequence
from functools import cache
from math import exp

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, hypergeom

LEVEL = 0.05
# Common success probabilities at which the test's size is computed. It is symmetric around 1/2.
GRID = np.linspace(0, 0.5, 501)


def is_uncertain(logprobs: Sequence[float], samples: int) -> bool:
    """Return whether a greedy answer's tokens leave it likely that one of the samples is another answer.

    The answer's probability is the product of its tokens', whose natural logarithms these are.
    """
    return exp(sum(logprobs)) < 1 - 1 / samples


@cache
def p_values(samples: int) -> NDArray[np.float64]:
    """Return Boschloo's two-sided p-value of each pair of success counts of `samples`: [samples + 1] * 2."""
    counts = np.arange(samples + 1)
    first, second = (one.ravel() for one in np.meshgrid(counts, counts, indexing="ij"))
    own = hypergeom.pmf(first, 2 * samples, first + second, samples)
    tables = hypergeom.pmf(counts, 2 * samples, (first + second)[:, None], samples)
    # A small slack: equal probabilities differ by roundings.
    fisher = np.where(tables <= own[:, None] * (1 + 1e-9), tables, 0).sum(axis=1)
    order = np.argsort(fisher, kind="stable")
    seen = binom.pmf(counts[:, None], samples, GRID)
    size = (seen[first] * seen[second])[order].cumsum(axis=0).max(axis=1)
    last = np.searchsorted(fisher[order], fisher * (1 + 1e-9), side="right") - 1
    return np.minimum(size[last], 1.0).reshape(samples + 1, samples + 1)


def flips(successes: Sequence[tuple[int, int]], samples: int, level: float = LEVEL) -> list[int]:
    """Return the numbers of the items that differ, the surest first, by both revisions' success counts."""
    if not successes:
        return []
    p = p_values(samples)[tuple(np.array(successes).T)]
    order = np.argsort(p, kind="stable")
    passed = np.flatnonzero(p[order] <= level * np.arange(1, len(p) + 1) / len(p))
    return [int(one) for one in order[: passed[-1] + 1]] if len(passed) else []
