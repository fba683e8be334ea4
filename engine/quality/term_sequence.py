"""A confidence sequence for a number, from unbiased terms that each have a range and a variance.

It is the betting confidence sequence of `engine.quality.sequential` for terms whose range and variance
change: reading without replacement leaves ever less to vary, and an item read with a small probability weighs
more. Each candidate's capital is the mean over bets of several sizes, each a Kelly bet on an effect of that
size (the bet is effect / variance, Waudby-Smith and Ramdas, arXiv 2010.09686, section B.3, with the effect
mixed over instead of estimated). The capital against the true value is a nonnegative martingale whatever the
predicted variance is, so by Ville's inequality the value ever leaves the interval with probability at most
alpha, and any stopping rule holds.

Shapes: `_T` terms, `_E` effects, `_M` candidates.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Differences of the candidate to the truth that the bets are made for.
EFFECTS_E = np.array([0.015, 0.03, 0.06, 0.12, 0.24])
# The most of its capital that a bet may lose at once.
TRUNCATION = 0.9
CANDIDATES = 401
# How many terms the predicted variances weigh as much as, before they are corrected by what is seen.
CALIBRATION = 2.0
ROUNDING = 1e-9


class MeanInterval(NamedTuple):
    """An estimate and its interval."""

    mean: float
    low: float
    high: float

    def within(self, least: float, most: float) -> Self:
        """Return the same within what is possible."""
        return self._replace(**{name: min(most, max(least, value)) for name, value in self._asdict().items()})

    def minus(self, known: float) -> Self:
        """Return the same of the difference to a known number."""
        return self._replace(**{name: value - known for name, value in self._asdict().items()})

    @property
    def width(self) -> float:
        """Return the interval's width."""
        return self.high - self.low

    def holds(self, value: float) -> bool:
        """Whether a value is in the interval, up to rounding."""
        return self.low - ROUNDING <= value <= self.high + ROUNDING


class TermSequence:
    """The interval in [`least`, `most`] of the terms' expectation, at level `1 - alpha`.

    `limits` are tested exactly, beside a grid of candidates. Whoever adds terms promises: given everything
    before it, a term's expectation is the number that is sought, and it lies between its bounds. The
    predicted variance is best near the true one.
    """

    def __init__(self, alpha: float, least: float, most: float, limits: Sequence[float] = ()):
        self._enough = math.log(2 / alpha)
        grid_M = np.linspace(least, most, CANDIDATES)
        self._grid_M: Array = np.unique(np.concatenate([grid_M, np.asarray(limits, float)]))
        shape = (2, len(EFFECTS_E), len(self._grid_M))
        self._capital = np.zeros(shape)
        self._rejected = np.zeros((2, len(self._grid_M)), bool)
        # Sums of value / variance, of 1 / variance, of squared errors / variance, and the number of these.
        self._weighted = self._information = self._errors = 0.0
        self._judged = 0

    def add(self, value: float, low: float, high: float, variance: float) -> None:
        """Add the next term, which could have lain in [low, high]; raises `ValueError` where it does not."""
        if not low - ROUNDING <= value <= high + ROUNDING:
            raise ValueError(f"The term lies in [{low:g}, {high:g}]; found {value:g}.")
        scale = (CALIBRATION + self._errors) / (CALIBRATION + self._judged)
        bets_E = EFFECTS_E / (variance * scale)
        for side, (x, worst, grid_M) in enumerate(
            ((value, low, self._grid_M), (-value, -high, -self._grid_M))
        ):
            most_M = TRUNCATION / np.maximum(grid_M - worst, 1e-12)
            bets_EM = np.minimum(bets_E[:, None], most_M)
            self._capital[side] += np.log1p(bets_EM * (x - grid_M))
            mixed_M = np.logaddexp.reduce(self._capital[side], axis=0) - math.log(len(EFFECTS_E))
            self._rejected[side] |= mixed_M >= self._enough
        if self._information:
            self._errors += (value - self._weighted / self._information) ** 2 / variance
            self._judged += 1
        self._weighted += value / variance
        self._information += 1 / variance

    @property
    def interval(self) -> MeanInterval:
        """Return the mean of the terms, weighted by their precision (NaN without any), and the interval.

        It reaches from the largest candidate that the number is shown to exceed to the smallest above it.
        """
        mean = float(self._weighted / self._information) if self._information else math.nan
        low = self._grid_M[self._rejected[0]].max(initial=self._grid_M[0])
        high = self._grid_M[self._rejected[1]].min(initial=self._grid_M[-1])
        return MeanInterval(mean, float(low), float(high))
