"""Sequential test of a canary's rate of faults against its baseline's, by a mixture of binomials.

Of the units that meet a fault, equal rates leave the canary the share that its weight sends there. The test
bets on a larger share: a likelihood ratio of binomials, mixed over how many times the canary's rate is the
baseline's (the mixture method of Robbins, Annals of Mathematical Statistics 41, 1970; as a test of two
streams of counts, Lindon and Malek, "Anytime-valid inference for multinomial count data", NeurIPS 2022). It
looks at faults alone, so that a few of them decide however many requests went well.
"""

import math
from collections.abc import Mapping

import numpy as np

# The mixture: the canary's rate is this many times the baseline's, with equal shares.
RATIOS = np.geomspace(1.25, 1000, 24)


def log_evidence(faults: Mapping[float, tuple[int, int]]) -> float:
    """Return the logarithm of the e-value against "the canary's rate is not above the baseline's".

    `faults` maps the canary's weight in a step to the numbers of its (canary, baseline) units with a fault.
    While the rates are equal, the e-value ever exceeds 1 / alpha with probability at most alpha (Ville's
    inequality). E-values of several steps multiply.
    """
    log_R = np.zeros_like(RATIOS)
    for weight, (canary, baseline) in faults.items():
        share_R = weight * RATIOS / (1 - weight + weight * RATIOS)
        log_R += canary * np.log(share_R / weight) + baseline * np.log((1 - share_R) / (1 - weight))
    most = float(log_R.max())
    return most + math.log(float(np.exp(log_R - most).mean()))
