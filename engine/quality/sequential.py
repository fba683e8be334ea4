"""Sequential test of a canary against its baseline, valid at every moment and not just at the end.

It is the betting confidence sequence of Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS B, 2023, arXiv 2010.09686): the hedged capital process with predictable plug-in
bets (their equations 23 to 26). Peeking after every reward and stopping at will is allowed: over the whole
canary, the true mean leaves the interval with probability at most alpha.

Shapes: `_N` observations, `_M` candidate means.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Bets are truncated at this share of the stake that could lose everything. Tuned for canaries, where a total
# failure must show within a few pairs; the paper suggests 1/2 or 3/4.
TRUNCATION = 0.75
GRID_STEPS = 400


class MeanSequence:
    """A confidence sequence for the mean of a stream in [0, 1], updated with any number of values.

    Every value outside the open interval (`lower`, `upper`) has been rejected at level `alpha`, now or
    earlier. `also` adds candidate means to the grid, so that they are tested exactly. An update with n values
    costs n times the grid size.
    """

    def __init__(self, alpha: float, also: tuple[float, ...] = ()):
        self.alpha = alpha
        self.n = 0
        self._sum = 0.5
        self._squares = 0.25
        self.grid_M = np.unique(np.concatenate([np.linspace(0, 1, GRID_STEPS + 1), also]))
        zeros = np.zeros_like(self.grid_M)
        # Logarithms of the capital that bets on a mean above, and below, each candidate.
        self._above_M, self._below_M = zeros, zeros.copy()
        self._best_above_M, self._best_below_M = zeros.copy(), zeros.copy()

    def update(self, x_N: Array) -> None:
        """Add the next observations (N,) of the stream, in order."""
        assert x_N.ndim == 1
        assert ((x_N >= 0) & (x_N <= 1)).all(), "observations lie in [0, 1]"
        for x in x_N:
            bet = plug_in_bet(self._squares / (self.n + 1), self.n + 1, self.alpha)
            above_M, below_M = log_growth(x, self.grid_M, bet)
            self._above_M = self._above_M + above_M
            self._below_M = self._below_M + below_M
            np.maximum(self._best_above_M, self._above_M, out=self._best_above_M)
            np.maximum(self._best_below_M, self._below_M, out=self._best_below_M)
            self._observe(float(x))

    @property
    def lower(self) -> float:
        """Return the largest candidate that the mean exceeds; 0 while there is none."""
        return float(self.grid_M[self._best_above_M >= self._threshold].max(initial=0.0))

    @property
    def upper(self) -> float:
        """Return the smallest candidate that the mean is below; 1 while there is none."""
        return float(self.grid_M[self._best_below_M >= self._threshold].min(initial=1.0))

    @property
    def _threshold(self) -> float:
        # Each of the two processes holds half of the capital.
        return math.log(2 / self.alpha)

    def _observe(self, x: float) -> None:
        self.n += 1
        self._sum += x
        mean = self._sum / (self.n + 1)
        self._squares += (x - mean) ** 2


def plug_in_bet(variance: float | Array, n: int | Array, alpha: float) -> float | Array:
    """Return the bet on observation `n` (from 1), given the variance of the earlier ones."""
    return np.sqrt(2 * math.log(2 / alpha) / (variance * n * np.log1p(n)))


def log_growth(x: float | Array, m: float | Array, bet: float | Array) -> tuple[Array, Array]:
    """Return the log growth of the capital that bets on a mean above `m`, and of the one that bets below."""
    with np.errstate(divide="ignore"):
        up = np.minimum(bet, TRUNCATION / np.asarray(m))
        down = np.minimum(bet, TRUNCATION / (1 - np.asarray(m)))
    return np.log1p(up * (x - m)), np.log1p(-down * (x - m))


class CanaryComparison:
    """A confidence sequence on the canary's mean reward minus the baseline's, in [-1, 1].

    Canary reward i is paired with the mean of the next k baseline rewards, where k is the number of
    baseline units for one canary unit at `weight`.
    """

    def __init__(self, weight: float, alpha: float, margin: float):
        # The small term rounds 0.95 / 0.05 to 19.
        self.group = max(1, math.floor((1 - weight) / weight + 1e-9))
        self._sequence = MeanSequence(alpha, also=((1 - margin) / 2, 0.5))

    @property
    def pairs(self) -> int:
        """Return the number of pairs so far."""
        return self._sequence.n

    @property
    def lower(self) -> float:
        """Return the interval's lower end."""
        return 2 * self._sequence.lower - 1

    @property
    def upper(self) -> float:
        """Return the interval's upper end."""
        return 2 * self._sequence.upper - 1

    def update(self, canary_N: Array, baseline_N: Array) -> None:
        """Update with both streams so far, each in order of arrival; only new pairs are computed."""
        pairs = min(len(canary_N), len(baseline_N) // self.group)
        new = slice(self.pairs, pairs)
        means_N = baseline_N[: pairs * self.group].reshape(pairs, self.group).mean(axis=1)
        self._sequence.update((canary_N[:pairs][new] - means_N[new] + 1) / 2)
