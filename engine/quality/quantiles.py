"""A confidence sequence for a quantile, from the ranks of the observations.

Howard and Ramdas, "Sequential estimation of quantiles with applications to A/B testing and best-arm
identification" (Bernoulli 28, 2022): the number of observations up to the quantile is binomial, so a
confidence sequence for it gives ranks, and the observations at these ranks bound the quantile. Here the
sequence is the beta-binomial mixture (Howard et al., "Time-uniform, nonparametric, nonasymptotic confidence
sequences", Annals of Statistics 49, 2021, section 3). Any distribution will do; heavy tails cost nothing.
"""

import math

import numpy as np
from scipy.special import betaln

from engine.quality.sequential import Array

# The mixture's beta distribution weighs as much as this many observations: it is narrowest around as many.
PRIOR = 10.0


def compatible_ranks(n: int, p: float, alpha: float) -> tuple[int, int]:
    """Return the least and the most of `n` observations that may lie below the quantile at `p`.

    Over all n, the true number leaves these limits with probability at most alpha.
    """
    k_N = np.arange(n + 1)
    a, b = PRIOR * p, PRIOR * (1 - p)
    mixed_N = betaln(k_N + a, n - k_N + b) - betaln(a, b)
    log_evidence_N = mixed_N - k_N * math.log(p) - (n - k_N) * math.log1p(-p)
    inside = np.flatnonzero(log_evidence_N < math.log(1 / alpha))
    return int(inside[0]), int(inside[-1])


def quantile_interval(values_N: Array, p: float, alpha: float) -> tuple[float, float]:
    """Return bounds of the quantile at `p` of nonnegative values (N,); (0, inf) while there are too few."""
    ordered_N = np.sort(values_N)
    least, most = compatible_ranks(len(ordered_N), p, alpha)
    lower = ordered_N[least - 1] if least else 0.0
    upper = ordered_N[most] if most < len(ordered_N) else math.inf
    return float(lower), float(upper)
