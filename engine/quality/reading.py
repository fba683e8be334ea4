"""Reads a suite's items one after another, the most telling ones first, until a question is answered.

Two targets, and a reading is for one of them. The suite: its items are a finite population, each is read at
most once, and a full read knows the mean exactly. The task: the items are a sample of it, so its interval
never vanishes.

Which item is read next is drawn by predicted uncertainty, mixed with a uniform share, so that every unread
item has a known probability. A term of the estimate is what the predictions say, plus the error of the one
that was read over its probability (arXiv 2601.20251 for the suite; Zrnic and Candes, "Active statistical
inference", arXiv 2403.03208, for the task): unbiased whatever the predictions are.

Shapes: `_N` items, `_R` items that are not read.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.quality.prediction import OutcomePredictor
from engine.quality.term_sequence import MeanInterval, TermSequence

Array = NDArray[np.float64]

# The share of each draw that is uniform over what is unread.
UNIFORM = 0.3
# Of the task's items, the share that is read; and how far a term of its mean may lie outside [0, 1]: a wider
# range leaves out more of what is certain, and forbids large bets.
READ_SHARE, BEYOND = 0.5, 1.5
# The deviation of an outcome at which an item is read with the probability `share`: a constant, since what is
# known of later items may not decide what is drawn before them.
TYPICAL_DEVIATION = 0.3
# The variance of the task's terms before any is seen: that of an outcome as likely right as wrong.
FIRST_VARIANCE = 0.25


class SuiteReading:
    """Which items of a suite to read next, and the interval of the suite's mean so far, in [0, 1].

    The difference to a revision whose outcomes are all known is this mean minus a known number, so that one
    reading answers for both. `limits` are means that the interval tests exactly. The order depends on `seed`
    and the outcomes.
    """

    def __init__(
        self, predictor: OutcomePredictor, seed: int, alpha: float = 0.05, limits: Sequence[float] = (),
        uniform: float = UNIFORM,
    ):  # fmt: skip
        self._predictor, self._uniform = predictor, uniform
        self._random = np.random.default_rng(seed)
        self._sequence = TermSequence(alpha, 0.0, 1.0, limits)
        self._predicted_N = predictor.predicted()
        self._outcomes_N = np.full(len(self._predicted_N), np.nan)
        self._chosen: list[Draw] = []

    def choose(self, count: int) -> list[int]:
        """Return the next items to read, in order: so many, or all that are left."""
        unread_R = np.flatnonzero(np.isnan(self._outcomes_N))
        for _ in range(min(count, len(unread_R))):
            predicted_R = self._predicted_N[unread_R]
            probability_R = draw_probabilities(predicted_R, self._uniform)
            at = int(self._random.choice(len(unread_R), p=probability_R))
            self._chosen.append(Draw(int(unread_R[at]), at, predicted_R, probability_R))
            unread_R = np.delete(unread_R, at)
        return [draw.item for draw in self._chosen]

    def add(self, outcomes: Sequence[float]) -> None:
        """Take the chosen items' outcomes, in their order; raises `ValueError` for one outside [0, 1]."""
        refuse_others(outcomes)
        for draw, outcome in zip(self._chosen, outcomes, strict=True):
            self._sequence.add(*draw.term(outcome, float(np.nansum(self._outcomes_N)), len(self._outcomes_N)))
            self._outcomes_N[draw.item] = outcome
            self._predictor.add(draw.item, outcome)
        self._chosen.clear()
        self._predicted_N = self._predictor.predicted()

    @property
    def items(self) -> int:
        """Return how many items were read."""
        return int((~np.isnan(self._outcomes_N)).sum())

    @property
    def interval(self) -> MeanInterval:
        """Return the estimate of the suite's mean and its interval: one number once all items are read."""
        known, count = float(np.nansum(self._outcomes_N)), len(self._outcomes_N)
        # If all unread items are wrong, and if all are right.
        return self._sequence.interval.within(known / count, (known + count - self.items) / count)


class TaskReading:
    """Which items of a suite to read, and intervals of the task's mean that the items are a sample of.

    Items pass in a random order, and each is read with a probability of its own, about `share` on average; a
    share of 1 reads all that pass. `against_N` are another revision's outcomes on the same items; `limits`
    are differences to it that its interval tests exactly.
    """

    def __init__(
        self, predictor: OutcomePredictor, against_N: Array, seed: int, alpha: float = 0.05,
        share: float = READ_SHARE, limits: Sequence[float] = (),
    ):  # fmt: skip
        self._predictor, self._share = predictor, share
        self._beyond = BEYOND if share < 1 else 0.0
        self._random = np.random.default_rng(seed)
        self._against_N = against_N
        self._own, self._difference = TermSequence(alpha, 0.0, 1.0), TermSequence(alpha, -1.0, 1.0, limits)
        self._predicted_N = predictor.predicted()
        self._order_N = self._random.permutation(len(self._predicted_N))
        self._passed = self.items = 0
        # Items that passed since the last outcomes, with the probability of each and whether it is read.
        self._passing: list[tuple[int, float, bool]] = []

    def choose(self, count: int) -> list[int]:
        """Return the next items to read, in order: so many, or fewer when all have passed."""
        probability_N = self._probabilities()
        chosen: list[int] = []
        while len(chosen) < count and self._passed < len(self._order_N):
            item = int(self._order_N[self._passed])
            is_read = bool(self._random.random() < probability_N[item])
            self._passing.append((item, float(probability_N[item]), is_read))
            self._passed += 1
            if is_read:
                chosen.append(item)
        return chosen

    def add(self, outcomes: Sequence[float]) -> None:
        """Take the chosen items' outcomes, in their order; raises `ValueError` for one outside [0, 1]."""
        refuse_others(outcomes)
        answered = iter(outcomes)
        for item, probability, is_read in self._passing:
            value = float(self._predicted_N[item])
            if is_read:
                outcome = next(answered)
                value += (outcome - value) / probability
                self._predictor.add(item, outcome)
                self.items += 1
            self._own.add(value, -self._beyond, 1 + self._beyond, FIRST_VARIANCE)
            gained = value - float(self._against_N[item])
            self._difference.add(gained, -1 - self._beyond, 1 + self._beyond, FIRST_VARIANCE)
        self._passing.clear()
        self._predicted_N = self._predictor.predicted()

    @property
    def interval(self) -> MeanInterval:
        """Return the estimate of the task's mean and its interval."""
        return self._own.interval

    @property
    def difference(self) -> MeanInterval:
        """Return the same of the difference to `against_N`, in [-1, 1]."""
        return self._difference.interval

    def _probabilities(self) -> Array:
        """Return with which probability each item is read: the larger, the less certain its outcome is."""
        if self._share >= 1:
            return np.ones(len(self._predicted_N))
        deviation_N = np.sqrt(self._predicted_N * (1 - self._predicted_N))
        mixed_N = UNIFORM + (1 - UNIFORM) * deviation_N / TYPICAL_DEVIATION
        worst_N = np.maximum(self._predicted_N, 1 - self._predicted_N)
        probability_N: Array = np.clip(self._share * mixed_N, worst_N / (worst_N + BEYOND), 1.0)
        return probability_N


class Draw:
    """One draw from what was unread: the item, its place there, and all predictions and probabilities."""

    def __init__(self, item: int, at: int, predicted_R: Array, probability_R: Array):
        self.item, self._at = item, at
        self._predicted_R, self._probability_R = predicted_R, probability_R

    def term(self, outcome: float, known: float, count: int) -> tuple[float, float, float, float]:
        """Return the term of the mean of `count` items, its bounds, and its predicted variance."""
        predicted_R, probability_R = self._predicted_R, self._probability_R
        expected = known + predicted_R.sum()
        error = (outcome - predicted_R[self._at]) / probability_R[self._at]
        lowest, highest = (-predicted_R / probability_R).min(), ((1 - predicted_R) / probability_R).max()
        variance = (predicted_R * (1 - predicted_R) / probability_R).sum() / count**2
        return (expected + error) / count, (expected + lowest) / count, (expected + highest) / count, variance


def draw_probabilities(predicted_R: Array, uniform: float) -> Array:
    """Return the probabilities with which the next item is drawn: a uniform share, the rest by uncertainty.

    The deviation of the error is the best choice for one term (Neyman's allocation).
    """
    deviation_R = np.sqrt(predicted_R * (1 - predicted_R))
    mixed_R: Array = uniform / len(predicted_R) + (1 - uniform) * deviation_R / deviation_R.sum()
    return mixed_R / mixed_R.sum()


def refuse_others(outcomes: Sequence[float]) -> None:
    """Raise `ValueError` for an outcome outside [0, 1], or that is no number."""
    for outcome in outcomes:
        if not 0 <= outcome <= 1:
            raise ValueError(f"Outcomes lie in [0, 1]; found {outcome:g}.")
