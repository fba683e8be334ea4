"""Readings of one suite that is drawn from a line: ours, and what it is compared with.

Every reading has an interval that holds at any stopping time, so that widths are compared like for like.

Shapes: `_N` items of the suite.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from _quality_lines import Line
from numpy.typing import NDArray

from engine.quality.prediction import OutcomePredictor
from engine.quality.reading import SuiteReading, TaskReading
from engine.quality.regression import RegressionReading
from engine.quality.term_sequence import TermSequence

Array = NDArray[np.float64]
BATCH = 8
# Draws of single items to reach a given difference.
TRIES = 20_000


@dataclass(frozen=True)
class Drawn:
    """A suite of a line's items, and the outcomes of a revision, its parent and those before.

    `truth` is the difference to the parent on the task, `own_truth` the revision's mean there; the parent of
    a first revision is the base.
    """

    own_N: Array
    parent_N: Array
    siblings_HN: Array
    segments: tuple[str, ...]
    truth: float
    own_truth: float
    is_first: bool

    @property
    def difference(self) -> float:
        """Return the difference on the suite."""
        return float((self.own_N - self.parent_N).mean())

    def predictor(self) -> OutcomePredictor:
        """Return a new predictor with this history."""
        return OutcomePredictor(self.parent_N, self.siblings_HN, self.segments)


def draw(
    line: Line, revision: int, items: int, random: np.random.Generator, difference: int | None = None
) -> Drawn | None:
    """Return a suite of so many items, drawn with replacement, so that the line's means are the task's truth.

    With `difference`, single items are drawn again until the revision has so many right answers more than its
    parent; None where that does not come about.
    """
    available, parent = line.outcomes_RN.shape[1], line.parents[revision]
    gain_N = line.outcomes_RN[revision].astype(int) - line.outcomes_RN[parent]
    at_N = random.integers(available, size=items)
    if difference is not None:
        for place, other in zip(
            random.integers(items, size=TRIES), random.integers(available, size=TRIES), strict=False
        ):
            gap, moved = gain_N[at_N].sum() - difference, gain_N[other] - gain_N[at_N[place]]
            if gap == 0:
                break
            if abs(gap + moved) < abs(gap):
                at_N[place] = other
        else:
            return None
    earlier = [other for other in range(revision) if other != parent]
    outcomes_RN = line.outcomes_RN[:, at_N].astype(float)
    own, other = line.outcomes_RN[[revision, parent]].mean(axis=1)
    segments = tuple(str(kind) for kind in line.segment_of_items[at_N])
    return Drawn(
        outcomes_RN[revision],
        outcomes_RN[parent],
        outcomes_RN[earlier],
        segments,
        own - other,
        own,
        parent == 0,
    )


def steps(
    reading: SuiteReading | TaskReading | RegressionReading, own_N: Array, most: int, batch: int = BATCH
) -> Iterator[int]:
    """Read batch after batch, at most so many items; yield how many were read."""
    while reading.items < most and (chosen := reading.choose(min(batch, most - reading.items))):
        reading.add(own_N[chosen])
        yield reading.items
    if isinstance(reading, TaskReading):
        # What passed unread after the last batch counts too.
        reading.add([])


class UniformPairs:
    """Paired reading in random order, without predictions: the difference to the parent on the suite."""

    def __init__(self, suite: Drawn, seed: int, alpha: float = 0.05):
        self._suite = suite
        self._unread = np.random.default_rng(seed).permutation(len(suite.own_N)).tolist()
        self._known = 0.0
        self._sequence = TermSequence(alpha, -1.0, 1.0)

    def read(self) -> None:
        """Read one item more."""
        own_N, parent_N = self._suite.own_N, self._suite.parent_N
        rest, count = len(self._unread), len(own_N)
        item = self._unread.pop()
        low, high = ((self._known + end * rest) / count for end in (-1, 1))
        difference = own_N[item] - parent_N[item]
        # Before any is seen, one item in ten is predicted to have flipped.
        self._sequence.add((self._known + difference * rest) / count, low, high, 0.1 * (rest / count) ** 2)
        self._known += difference

    @property
    def width(self) -> float:
        """Return the width of the interval."""
        return self._sequence.interval.width


class IndependentItems:
    """Plain reading: independent random items for each of the two, as a sample of the task."""

    def __init__(self, suite: Drawn, seed: int, alpha: float = 0.05):
        self._random, self._sides = np.random.default_rng(seed), (suite.own_N, suite.parent_N)
        self._sequence = TermSequence(alpha, -1.0, 1.0)

    def read(self) -> None:
        """Read one item more of each."""
        own, parent = (float(side_N[self._random.integers(len(side_N))]) for side_N in self._sides)
        self._sequence.add(own - parent, -1.0, 1.0, 0.4)

    @property
    def width(self) -> float:
        """Return the width of the interval."""
        return self._sequence.interval.width


class UniformUnpaired:
    """Plain reading without replacement: random items for each of the two, which are not the same ones."""

    def __init__(self, suite: Drawn, seed: int, alpha: float = 0.05):
        random, self._sides = np.random.default_rng(seed), (suite.own_N, suite.parent_N)
        self._unread = [random.permutation(len(side_N)).tolist() for side_N in self._sides]
        self._known = [0.0, 0.0]
        self._sequence = TermSequence(alpha, -1.0, 1.0)

    def read(self) -> None:
        """Read one item more of each."""
        count, rest, terms, lows, highs = len(self._sides[0]), len(self._unread[0]), [], [], []
        for side, (side_N, unread) in enumerate(zip(self._sides, self._unread, strict=True)):
            value, known = side_N[unread.pop()], self._known[side]
            terms.append((known + value * rest) / count)
            lows.append(known / count)
            highs.append((known + rest) / count)
            self._known[side] += value
        self._sequence.add(
            terms[0] - terms[1], lows[0] - highs[1], highs[0] - lows[1], 0.4 * (rest / count) ** 2
        )

    @property
    def width(self) -> float:
        """Return the width of the interval."""
        return self._sequence.interval.width


def items_for(reading: UniformPairs | UniformUnpaired | IndependentItems, width: float, most: int) -> int:
    """Return after how many items a reading's interval is so narrow; `most` where it never is."""
    for count in range(1, most + 1):
        reading.read()
        if reading.width <= width:
            return count
    return most
