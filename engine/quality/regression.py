"""Reads a suite until it is known whether a revision is worse than its baseline by a margin.

Two answers end the reading: the difference is shown to be above -margin (it has not fallen so far), or below
0 (it is worse). A fall of the margin or more is passed with probability at most alpha / 2. On the suite an
equal revision is held with probability at most alpha / 2, since reading all items answers every question; of
the task, a revision is also held where the items run out before an answer. Between the margin and 0 either
answer may come.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.quality.prediction import OutcomePredictor
from engine.quality.reading import SuiteReading, TaskReading
from engine.quality.term_sequence import ROUNDING, MeanInterval

Array = NDArray[np.float64]
Target = Literal["suite", "task"]


class RegressionReading:
    """Chooses the items to read of a revision whose baseline's outcomes are known, until the question is
    answered.

    `baseline_N` and `siblings_HN` are the outcomes of the baseline, and of other earlier revisions, on the
    suite's items; NaN where a sibling's is unknown. `target` is what the difference is of.
    """

    def __init__(
        self, target: Target, baseline_N: Array, siblings_HN: Array, segments: Sequence[str], seed: int,
        margin: float, alpha: float = 0.05,
    ):  # fmt: skip
        self.margin = margin
        predictor = OutcomePredictor(baseline_N, siblings_HN, segments)
        self._baseline = float(baseline_N.mean())
        # To reject a limit is to be above it: what is above -margin by twice the rounding has not fallen so
        # far.
        limits = (2 * ROUNDING - margin, -2 * ROUNDING)
        self._reading: SuiteReading | TaskReading = (
            SuiteReading(predictor, seed, alpha, [self._baseline + limit for limit in limits])
            if target == "suite"
            # Its interval never vanishes: all items are often too few, and no share of them is left out.
            else TaskReading(predictor, baseline_N, seed, alpha, share=1.0, limits=limits)
        )

    @property
    def items(self) -> int:
        """Return how many items were read."""
        return self._reading.items

    def choose(self, count: int) -> list[int]:
        """Return the next items to read, at most so many; none once there is an answer, or all are read."""
        return [] if self.is_answered else self._reading.choose(count)

    def add(self, outcomes: Sequence[float]) -> None:
        """Take the chosen items' outcomes, in their order; raises `ValueError` for one outside [0, 1]."""
        self._reading.add(outcomes)

    @property
    def own(self) -> MeanInterval:
        """Return the estimate of the revision's mean with its interval, in [0, 1]."""
        return self._reading.interval

    @property
    def difference(self) -> MeanInterval:
        """Return the same of the difference to the baseline, in [-1, 1]."""
        if isinstance(self._reading, TaskReading):
            return self._reading.difference
        # The baseline's mean on the suite's own items is known.
        return self._reading.interval.minus(self._baseline)

    @property
    def is_answered(self) -> bool:
        """Whether reading on could change nothing."""
        found = self.difference
        return found.low > -self.margin + ROUNDING or found.high < -ROUNDING

    @property
    def has_fallen(self) -> bool:
        """Whether the revision must be held, as far as it was read: it is not shown to be above -margin."""
        return self.difference.low <= -self.margin + ROUNDING
