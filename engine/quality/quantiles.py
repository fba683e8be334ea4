"""A confidence sequence for a quantile, from the ranks of the observations.

Howard and Ramdas, "Sequential estimation of quantiles with applications to A/B testing and best-arm
identification" (Bernoulli 28, 2022): the number of observations up to the quantile is binomial, so a
confidence sequence for it gives ranks, and the observations at these ranks bound the quantile. Here the
sequence is the beta-binomial mixture (Howard et al., "Time-uniform, nonparametric, nonasymptotic confidence
sequences", Annals of Statistics 49, 2021, section 3). Any distribution will do; heavy tails cost nothing.
"""

import math
from bisect import insort

# The mixture's beta distribution weighs as much as this many observations: it is narrowest around as many.
PRIOR = 10.0


class QuantileSequence:
    """Bounds of the quantile at `p` of a stream of nonnegative values.

    Over all lengths of the stream, they miss it with probability at most `alpha`.
    """

    def __init__(self, p: float, alpha: float):
        self._p, self._enough = p, math.log(1 / alpha)
        self._ordered: list[float] = []
        # The least and the most observations that may lie below the quantile.
        self._least = self._most = 0

    def add(self, value: float) -> None:
        """Add the next value. Another observation moves either rank by one or not at all."""
        insort(self._ordered, value)
        n = len(self._ordered)
        self._least += not self._is_compatible(self._least, n)
        self._most += self._is_compatible(self._most + 1, n)

    @property
    def lower(self) -> float:
        """Return the lower bound; 0 while there are too few values."""
        return self._ordered[self._least - 1] if self._least else 0.0

    @property
    def upper(self) -> float:
        """Return the upper bound; infinite while there are too few values."""
        return self._ordered[self._most] if self._most < len(self._ordered) else math.inf

    def _is_compatible(self, k: int, n: int) -> bool:
        return log_mixture(k, n, self._p) < self._enough


def log_mixture(k: int, n: int, p: float) -> float:
    """Return the log evidence against the quantile at `p` when `k` of `n` observations lie below it."""
    a, b = PRIOR * p, PRIOR * (1 - p)
    mixed = _log_beta(k + a, n - k + b) - _log_beta(a, b)
    return mixed - k * math.log(p) - (n - k) * math.log1p(-p)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
