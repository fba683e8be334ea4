"""Predicts how a revision answers each item of a suite, from earlier revisions and the items read so far.

A prediction decides what is read next and how narrow an interval becomes, never whether it holds: a wrong one
costs items. That matters, because predictors fail for a revision that is better than all before it (arXiv
2506.07673); here each outcome that is read corrects the predictions of the items like it.

Shapes: `_H` earlier revisions, `_N` items.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# How many outcomes of its own a group of items needs to weigh as much as what is known without it.
STRENGTH = 8.0
# Nothing is certain: a prediction keeps this far from 0 and 1.
LEAST = 0.02
# With no history an item is as likely right as wrong; with one, so much of the earlier outcomes is believed.
BELIEVED = 0.7
# Where the siblings' mean outcome is cut into groups: none, few, half, most, all of them were right.
CUTS = (0.01, 1 / 3, 2 / 3, 0.99)


class OutcomePredictor:
    """The expected outcome in [0, 1] of each item.

    `parent_N` are the parent's outcomes, `siblings_HN` those of other earlier revisions, NaN where an item
    was not read; `segments` is each item's kind. All may be missing. Items are grouped by the parent's
    outcome, then by the siblings' as well, then by segment as well; each group's mean is drawn towards that
    of the group around it (shrinkage, as the mean of a beta distribution with `STRENGTH` earlier outcomes).
    """

    def __init__(self, parent_N: Array, siblings_HN: Array, segments: Sequence[str]):
        count = len(parent_N)
        with_parent = ~np.isnan(parent_N)
        known_N = (~np.isnan(siblings_HN)).sum(axis=0)
        share_N = np.where(known_N, np.nansum(siblings_HN, axis=0) / np.maximum(known_N, 1), parent_N)
        earlier_N = np.where(with_parent, (parent_N + share_N) / 2, share_N)
        self._prior_N = 0.5 + BELIEVED * (np.nan_to_num(earlier_N, nan=0.5) - 0.5)
        # No outcome is a group too.
        of_parent_N = np.where(with_parent, np.digitize(parent_N, CUTS), len(CUTS) + 1)
        of_siblings_N = np.where(known_N, np.digitize(share_N, CUTS), len(CUTS) + 1)
        _, of_segment_N = np.unique(np.asarray(segments or [""] * count), return_inverse=True)
        self._groups = [of_parent_N]
        for finer_N in (of_siblings_N, of_segment_N):
            _, group_N = np.unique(np.stack([self._groups[-1], finer_N]), axis=1, return_inverse=True)
            self._groups.append(group_N.reshape(-1))
        self._counts = [np.zeros(count + len(CUTS) + 2) for _ in self._groups]
        self._sums = [np.zeros_like(counts) for counts in self._counts]

    def add(self, item: int, outcome: float) -> None:
        """Take the outcome of an item that was read."""
        for group_N, counts, sums in zip(self._groups, self._counts, self._sums, strict=True):
            counts[group_N[item]] += 1
            sums[group_N[item]] += outcome

    def predicted(self) -> Array:
        """Return the expected outcome of each item, shape `_N`."""
        mean_N = self._prior_N
        for group_N, counts, sums in zip(self._groups, self._counts, self._sums, strict=True):
            mean_N = (STRENGTH * mean_N + sums[group_N]) / (STRENGTH + counts[group_N])
        clipped: Array = np.clip(mean_N, LEAST, 1 - LEAST)
        return clipped
