"""Whether a repeated figure keeps its bound, by an interval that holds after any number of repeats.

`MedianInterval` is an anytime-valid confidence sequence of a median: Howard and Ramdas, "Sequential
estimation of quantiles with applications to A/B testing and best-arm identification" (Bernoulli 2022, arXiv
1906.09712). It counts how many values lie above a candidate. The mixture here is half a uniform one over the
share of values on one side, from 1/2 to 1, and half a bet that every value lies there: six values that agree
give an interval at 95%. By Ville's inequality the median is ever outside with probability at most alpha, so
one may look after each value and stop at will.

Assumption: given the values before it, each value is above the median with probability at most 1/2, and below
it likewise. They need neither be independent nor alike otherwise. Values are counted, never added, so ratios
need no bound.
"""

import itertools
import math
import statistics
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, t

ALPHA = 0.05
MET, MISSED, UNDECIDED = "met", "missed", "undecided"


def evidence(count: int, above: int) -> tuple[int, int]:
    """Return the capital, as a fraction, that bet on the median being larger than a candidate.

    `above` of `count` values exceed the candidate. The uniform half is the integral of
    2 (2p)^above (2 - 2p)^(count - above) over p in [1/2, 1].
    """
    uniform = ways = 1
    for i in range(above):
        ways = ways * (count + 1 - i) // (i + 1)
        uniform += ways
    below = (count + 1) * math.comb(count, above)
    whole = below << count if above == count else 0
    return uniform + whole, 2 * below


def needed(alpha: float) -> Iterator[int]:
    """Yield how many of 1, 2, 3, ... values must lie on one side; more than there are where none suffice.

    One value more needs as many or one more: it multiplies the capital by at most 1 on the other side, and by
    at least 1 on this one.
    """
    least, side = math.ceil(2 / alpha), 1
    for count in itertools.count(1):
        won, staked = evidence(count, side)
        side += won < least * staked
        yield side


@dataclass(frozen=True)
class Interval:
    """Where a figure lies at `1 - ALPHA`, after `count` repeats; infinite where nothing is known."""

    lower: float
    upper: float
    count: int

    def says(self, least: float, most: float) -> str:
        """Return `met`, `missed` or `undecided` for a bound; an empty interval shows a broken assumption."""
        if self.lower > self.upper:
            return UNDECIDED
        if least <= self.lower and self.upper <= most:
            return MET
        return MISSED if self.upper < least or self.lower > most else UNDECIDED

    def __str__(self) -> str:
        return f"{self.lower:.4g}..{self.upper:.4g}"


class MedianInterval:
    """A confidence sequence of the median of a stream."""

    def __init__(self, values: Iterable[float] = (), alpha: float = ALPHA):
        self._needed = needed(alpha)
        self._ordered: list[float] = []
        self._lower, self._upper = -math.inf, math.inf
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Take the next value; raises `ValueError` for NaN."""
        if math.isnan(value):
            raise ValueError("A repeat is not a number, so its median is not known.")
        insort(self._ordered, value)
        side = next(self._needed)
        if side <= len(self._ordered):
            self._lower = max(self._lower, self._ordered[-side])
            self._upper = min(self._upper, self._ordered[side - 1])

    def now(self) -> Interval:
        """Return the interval after the values so far."""
        return Interval(self._lower, self._upper, len(self._ordered))


def share_interval(values: Sequence[float]) -> Interval:
    """Return the exact interval (Clopper and Pearson) of the share of ones in values of a given number."""
    low, high = binomtest(int(sum(values)), len(values)).proportion_ci(1 - ALPHA)
    return Interval(float(low), float(high), len(values))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return Student's interval of the mean of rounds of one kind; a single round tells nothing."""
    count = len(values)
    if count < 2:
        return Interval(-math.inf, math.inf, count)
    half = float(t.ppf(1 - ALPHA / 2, count - 1)) * statistics.stdev(values) / math.sqrt(count)
    middle = statistics.fmean(values)
    return Interval(middle - half, middle + half, count)
