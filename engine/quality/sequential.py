"""Sequential test of a canary against its baseline, valid at every moment and not just at the end.

It is the betting confidence sequence of Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS B, 2023, arXiv 2010.09686): the hedged capital process (their equations 23 to 26).
Each bet is the larger of their predictable plug-in, which finds large effects soon, and their approximate
GRAPA (section B.3), which finds small ones. Peeking after every reward and stopping at will is allowed: over
the whole canary, the true mean leaves the interval with probability at most alpha.

Shapes: `_N` observations, `_M` candidate means.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

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


class Bets:
    """The bets on the next observation of a stream in [0, 1], from its earlier ones.

    `above` and `below` are the means that the two sides try hardest to exclude: that the mean is at most
    `above`, or at least `below`. By default neither, which leaves both sides the plug-in bet.
    """

    def __init__(self, alpha: float, above: float = 1.0, below: float = 0.0):
        self.n = 0
        self._above, self._below = above, below
        self._scale = 2 * math.log(2 / alpha)
        self._sum, self._squares = 0.5, 0.25

    def next(self) -> tuple[float, float]:
        """Return the bets on a mean above, and below, a candidate; before truncation."""
        n = self.n + 1
        plug_in = math.sqrt(self._scale / (self._squares * math.log1p(n)))
        mean, variance = self._sum / n, self._squares / n
        gain, loss = mean - self._above, self._below - mean
        return (
            max(plug_in, gain / (variance + gain * gain)),
            max(plug_in, loss / (variance + loss * loss)),
        )

    def add(self, x: float) -> None:
        """Take the next observation."""
        self.n += 1
        self._sum += x
        self._squares += (x - self._sum / (self.n + 1)) ** 2


class MeanSequence:
    """A confidence sequence for the mean of a stream in [0, 1].

    Every value outside the open interval (`lower`, `upper`) has been rejected at level `alpha`, now or
    earlier. The limits `above` and `below` are tested exactly, and in constant time an observation:
    `is_above` says that the mean exceeds the first, `is_below` that it is less than the second. The interval
    is computed when it is asked for, on a grid of candidates.
    """

    def __init__(self, alpha: float, above: float = 1.0, below: float = 0.0):
        self.is_above = self.is_below = False
        self._above, self._below = above, below
        self._most_up, self._most_down = most_bet(above), most_bet(1 - below)
        self._bets = Bets(alpha, above, below)
        # Each of the two sides holds half of the capital.
        self._threshold = math.log(2 / alpha)
        # Logarithms of the capital that bets on a mean above `above`, and below `below`.
        self._gained = self._lost = 0.0
        # Observations with their bets that the grid has not seen.
        self._waiting: list[tuple[float, float, float]] = []
        self._grid_M = np.linspace(0, 1, GRID_STEPS + 1)
        # Of each candidate and side, the capital and the most that it ever was.
        self._capital_M = [np.zeros(GRID_STEPS + 1), np.zeros(GRID_STEPS + 1)]
        self._most_M = [np.zeros(GRID_STEPS + 1), np.zeros(GRID_STEPS + 1)]

    @property
    def n(self) -> int:
        """Return the number of observations."""
        return self._bets.n

    def add(self, x: float) -> None:
        """Add the next observation of the stream; raises `ValueError` outside [0, 1]."""
        if not 0 <= x <= 1:
            raise ValueError(f"Observations lie in [0, 1]; found {x:g}.")
        up, down = self._bets.next()
        self._bets.add(x)
        self._gained += math.log1p(min(up, self._most_up) * (x - self._above))
        self._lost += math.log1p(-min(down, self._most_down) * (x - self._below))
        self.is_above = self.is_above or self._gained >= self._threshold
        self.is_below = self.is_below or self._lost >= self._threshold
        self._waiting.append((x, up, down))
        if len(self._waiting) == CHUNK:
            self._fill_grid()

    def update(self, values: Iterable[float]) -> None:
        """Add the next observations of the stream, in order; raises `ValueError` outside [0, 1]."""
        for x in values:
            self.add(x)

    @property
    def lower(self) -> float:
        """Return the largest candidate that the mean exceeds; 0 while there is none."""
        self._fill_grid()
        bound = float(self._grid_M[self._most_M[0] >= self._threshold].max(initial=0.0))
        return max(bound, self._above) if self.is_above else bound

    @property
    def upper(self) -> float:
        """Return the smallest candidate that the mean is below; 1 while there is none."""
        self._fill_grid()
        bound = float(self._grid_M[self._most_M[1] >= self._threshold].min(initial=1.0))
        return min(bound, self._below) if self.is_below else bound

    def _fill_grid(self) -> None:
        if not self._waiting:
            return
        x_N, up_N, down_N = np.array(self._waiting).T[:, :, None]
        self._waiting.clear()
        for side, growth_NM in enumerate(log_growth(x_N, self._grid_M, up_N, down_N)):
            growth_NM[0] += self._capital_M[side]
            capital_NM = growth_NM.cumsum(axis=0)
            self._capital_M[side] = capital_NM[-1]
            self._most_M[side] = np.maximum(self._most_M[side], capital_NM.max(axis=0))


def most_bet(stake: float) -> float:
    """Return the largest bet on an observation that may lose this much of each unit of the bet."""
    return TRUNCATION / stake if stake else math.inf


def log_growth(
    x: float | Array, m: float | Array, up: float | Array, down: float | Array
) -> tuple[Array, Array]:
    """Return the log growth of the capital that bets `up` on a mean above `m`, and of the one below it."""
    with np.errstate(divide="ignore"):
        up = np.minimum(up, TRUNCATION / np.asarray(m))
        down = np.minimum(down, TRUNCATION / (1 - np.asarray(m)))
    return np.log1p(up * (x - m)), np.log1p(-down * (x - m))


@dataclass(slots=True)
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
        if len(own) < size or len(self._waiting[not unit.is_canary]) < self._sizes[not unit.is_canary]:
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


class PairedComparison:
    """A confidence sequence on the mean of differences in [-1, 1]; the value of a unit is one of them.

    Each side is wrong with probability at most alpha / 2, over the whole stream. `above` and `below` are the
    limits that are tested exactly.
    """

    def __init__(self, alpha: float, above: float = 1.0, below: float = -1.0):
        self._sequence = MeanSequence(alpha, (1 + above) / 2, (1 + below) / 2)

    @property
    def pairs(self) -> int:
        """Return the number of pairs so far."""
        return self._sequence.n

    @property
    def is_above(self) -> bool:
        """Whether the difference is shown to exceed `above`."""
        return self._sequence.is_above

    @property
    def is_below(self) -> bool:
        """Whether the difference is shown to be less than `below`."""
        return self._sequence.is_below

    @property
    def lower(self) -> float:
        """Return the interval's lower end."""
        return _difference(self._sequence.lower)

    @property
    def upper(self) -> float:
        """Return the interval's upper end."""
        return _difference(self._sequence.upper)

    def add(self, unit: Unit) -> None:
        """Add the next unit of the stream, in order of their first value."""
        self._sequence.add((unit.total + 1) / 2)


class CanaryComparison(PairedComparison):
    """The same on the canary's mean minus the baseline's, over all steps.

    The units of a step are compared with each other only; the capital of the bets multiplies over the steps.
    """

    def __init__(self, weights: dict[int, float], alpha: float, above: float, below: float):
        super().__init__(alpha, above, below)
        self._pairing = Pairing(weights)

    def add(self, unit: Unit) -> None:
        """Add the next unit of the stream, in order of their first value."""
        difference = self._pairing.add(unit)
        if difference is not None:
            # A mean of equal values may miss 1 by a rounding.
            self._sequence.add(min(1.0, max(0.0, (difference + 1) / 2)))


def _difference(mean: float) -> float:
    """Return the difference that stands for a mean of pairs, without the rounding: 0.55 is 0.1."""
    return round(2 * mean - 1, 12)


def least_pairs(alpha: float, margin: float) -> float:
    """Return after how many pairs equal arms whose values never differ are shown to be within the margin.

    No canary that is merely equal is cleared earlier. Infinite beyond `MOST_PAIRS`, as for a margin of 0.
    """
    m, capital, enough = (1 - margin) / 2, 0.0, math.log(2 / alpha)
    most = most_bet(m)
    if math.log1p(most * (0.5 - m)) * MOST_PAIRS < enough:
        return math.inf
    bets = Bets(alpha, above=m)
    for n in range(1, MOST_PAIRS):
        capital += math.log1p(min(bets.next()[0], most) * (0.5 - m))
        if capital >= enough:
            return n
        bets.add(0.5)
    return math.inf
