"""Sequential test of a canary against its baseline, valid at every moment and not just at the end.

It is the betting confidence sequence of Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS B, 2023, arXiv 2010.09686): the hedged capital process with predictable plug-in
bets (their equations 23 to 26). Peeking after every reward and stopping at will is allowed: over the whole
canary, the true mean leaves the interval with probability at most alpha.

Shapes: `_N` observations, `_M` candidate means.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Bets are truncated at this share of the stake that could lose everything. Tuned for canaries, where a total
# failure must show within a few pairs; the paper suggests 1/2 or 3/4.
TRUNCATION = 0.75
GRID_STEPS = 400
# Observations whose growth is computed at once; bounds the memory of a long stream.
CHUNK = 256
# An arm may be ahead of the other by this many pairs; older units leave, so that pairs stay concurrent.
AHEAD = 16
# More pairs than any canary has.
MOST_PAIRS = 1 << 20


class MeanSequence:
    """A confidence sequence for the mean of a stream in [0, 1], updated with any number of values.

    Every value outside the open interval (`lower`, `upper`) has been rejected at level `alpha`, now or
    earlier. `grid_M` are the candidate means that are tested; by default a fine grid, to which `also` is
    added, so that these are tested exactly. An update with n values costs n times the grid size.
    """

    def __init__(self, alpha: float, also: tuple[float, ...] = (), grid_M: Array | None = None):
        self.alpha = alpha
        self.n = 0
        self._sum = 0.5
        self._squares = 0.25
        fine_M = np.linspace(0, 1, GRID_STEPS + 1) if grid_M is None else grid_M
        self.grid_M = np.unique(np.concatenate([fine_M, also]))
        zeros = np.zeros_like(self.grid_M)
        # Logarithms of the capital that bets on a mean above, and below, each candidate.
        self._above_M, self._below_M = zeros, zeros.copy()
        self._best_above_M, self._best_below_M = zeros.copy(), zeros.copy()

    def update(self, x_N: Array) -> None:
        """Add the next observations (N,) of the stream, in order; raises `ValueError` outside [0, 1]."""
        assert x_N.ndim == 1
        if not ((x_N >= 0) & (x_N <= 1)).all():
            raise ValueError(f"Observations lie in [0, 1]; found {x_N.min():g} to {x_N.max():g}.")
        for start in range(0, len(x_N), CHUNK):
            self._update(x_N[start : start + CHUNK])

    def _update(self, x_N: Array) -> None:
        n_N = np.arange(self.n + 1, self.n + len(x_N) + 1)
        sum_N = _running(self._sum, x_N)
        squares_N = _running(self._squares, (x_N - sum_N[1:] / (n_N + 1)) ** 2)
        bet_N = np.asarray(plug_in_bet(squares_N[:-1] / n_N, n_N, self.alpha))
        above_NM, below_NM = log_growth(x_N[:, None], self.grid_M, bet_N[:, None])
        above_NM, below_NM = _running(self._above_M, above_NM), _running(self._below_M, below_NM)
        self._above_M, self._below_M = above_NM[-1], below_NM[-1]
        self._best_above_M = np.maximum(self._best_above_M, above_NM.max(axis=0))
        self._best_below_M = np.maximum(self._best_below_M, below_NM.max(axis=0))
        self.n += len(x_N)
        self._sum, self._squares = float(sum_N[-1]), float(squares_N[-1])

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


def _running(first: float | Array, x_N: Array) -> Array:
    """Return the running sums, from `first` on: one more than there are values."""
    start = np.broadcast_to(first, x_N.shape[1:])[None]
    total_N: Array = np.concatenate([start, x_N]).cumsum(axis=0)
    return total_N


def plug_in_bet(variance: float | Array, n: int | NDArray[Any], alpha: float) -> float | Array:
    """Return the bet on observation `n` (from 1), given the variance of the earlier ones."""
    return np.sqrt(2 * math.log(2 / alpha) / (variance * n * np.log1p(n)))


def log_growth(x: float | Array, m: float | Array, bet: float | Array) -> tuple[Array, Array]:
    """Return the log growth of the capital that bets on a mean above `m`, and of the one that bets below."""
    with np.errstate(divide="ignore"):
        up = np.minimum(bet, TRUNCATION / np.asarray(m))
        down = np.minimum(bet, TRUNCATION / (1 - np.asarray(m)))
    return np.log1p(up * (x - m)), np.log1p(-down * (x - m))


@dataclass
class Unit:
    """A unit (user) in one step of a canary: which arm it is in, and the mean of its values in [0, 1].

    `step` is the version of the route that it was served under, `key` the API key that it came by.
    """

    step: int
    key: str
    is_canary: bool
    total: float
    count: int = 1

    @property
    def value(self) -> float:
        """The mean of its values."""
        return self.total / self.count


class Pairing:
    """Pairs concurrent units of the two arms, given the canary's weight in each step.

    A pair is the mean of the canary's next units minus the mean of the baseline's next ones, as many of each
    as the weight sends: one and four at 20%. Who is paired depends on the arms alone, never on values: the
    expectation of each pair is the difference of the arms, also while both drift. A unit counts once, with
    its mean at that time. An arm that is ahead by more than `AHEAD` pairs loses its oldest unit, so that
    pairs stay concurrent when the arms are rated unequally often.
    """

    def __init__(self, weights: dict[int, float]):
        self._weights = weights
        self._step: int | None = None
        self._waiting: dict[bool, deque[Unit]] = {True: deque(), False: deque()}
        self._sizes = {True: 1, False: 1}

    def add(self, unit: Unit) -> float | None:
        """Take the next unit; return the difference of the pair that it completes, in [-1, 1]."""
        if unit.step != self._step:
            self._step, self._sizes = unit.step, group_sizes(self._weights[unit.step])
            for waiting in self._waiting.values():
                waiting.clear()
        own, size = self._waiting[unit.is_canary], self._sizes[unit.is_canary]
        own.append(unit)
        if any(len(self._waiting[arm]) < self._sizes[arm] for arm in (True, False)):
            if len(own) > AHEAD * size:
                own.popleft()
            return None
        return self._take(True) - self._take(False)

    def _take(self, arm: bool) -> float:
        size = self._sizes[arm]
        return sum(self._waiting[arm].popleft().value for _ in range(size)) / size


def group_sizes(weight: float) -> dict[bool, int]:
    """Return how many units of the canary (True) and of the baseline (False) make a pair at this weight."""
    # The small term rounds 0.95 / 0.05 to 19.
    ratio = (1 - weight) / weight
    return {True: max(1, math.floor(1 / ratio + 1e-9)), False: max(1, math.floor(ratio + 1e-9))}


class CanaryComparison:
    """A confidence sequence on the canary's mean minus the baseline's, in [-1, 1], over all steps.

    Each side is wrong with probability at most alpha / 2, over the whole canary. The units of a step are
    compared with each other only; the capital of the bets multiplies over the steps.
    """

    def __init__(self, weights: dict[int, float], alpha: float, margin: float, only_limits: bool = False):
        """Test the limits -margin, 0 and margin exactly, and with `only_limits` nothing else."""
        limits = ((1 - margin) / 2, 0.5, (1 + margin) / 2)
        self.pairing = Pairing(weights)
        self._sequence = MeanSequence(alpha, limits, np.array([0.0, 1.0]) if only_limits else None)

    @property
    def pairs(self) -> int:
        """Return the number of pairs so far."""
        return self._sequence.n

    @property
    def lower(self) -> float:
        """Return the interval's lower end."""
        return _difference(self._sequence.lower)

    @property
    def upper(self) -> float:
        """Return the interval's upper end."""
        return _difference(self._sequence.upper)

    def update(self, units: Iterable[Unit]) -> None:
        """Add the next units of the stream, in order of their first value."""
        found = (self.pairing.add(unit) for unit in units)
        pairs = [(difference + 1) / 2 for difference in found if difference is not None]
        if pairs:
            # A mean of equal values may miss 1 by a rounding.
            self._sequence.update(np.clip(np.array(pairs), 0.0, 1.0))


def _difference(mean: float) -> float:
    """Return the difference that stands for a mean of pairs, without the rounding: 0.55 is 0.1."""
    return round(2 * mean - 1, 12)


def least_pairs(alpha: float, margin: float) -> float:
    """Return after how many pairs equal arms whose values never differ are shown to be within the margin.

    No canary that is merely equal is cleared earlier. Infinite beyond `MOST_PAIRS`, as for a margin of 0.
    """
    n = 64
    while n <= MOST_PAIRS:
        n_N = np.arange(1, n + 1)
        bet_N = plug_in_bet(0.25 / n_N, n_N, alpha)
        above_N, _ = log_growth(0.5, (1 - margin) / 2, bet_N)
        enough = np.flatnonzero(np.cumsum(above_N) >= math.log(2 / alpha))
        if len(enough):
            return float(enough[0] + 1)
        n *= 4
    return math.inf
