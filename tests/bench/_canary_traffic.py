"""Simulated users of a canary: who answers them, what they rate, and when the rating arrives."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

WEIGHT = 0.2
# The baseline's mean reward.
LEVEL = 0.9
# Requests of one day, by which the reward rises and falls; and how far.
DAY, SWING = 1500, 0.1
# Of the users, the share whose request count follows a power law, so that some send hundreds.
POWER = 1.2
MISSING, LATE = 0.3, 150.0
ERRORS = 0.01
# Of the kind `faults`: outcomes and how often, and the spread of the times' logarithms.
OUTCOMES = {"ok": 0.94, "truncated": 0.03, "invalid": 0.02, "refused": 0.01}
SPREAD = 0.5


@dataclass(frozen=True)
class Requests:
    """Requests (N,) in order: user, arm, status, reward; `arrives_N` is when the rating does, NaN: never.

    `details` are outcome, time to the first token and time for each token; None where nobody looked.
    """

    user_N: np.ndarray
    canary_N: np.ndarray
    status_N: np.ndarray
    reward_N: np.ndarray
    arrives_N: np.ndarray
    details: tuple[Iterable[str], Iterable[float], Iterable[float]] | None = None

    def told(self) -> Iterable[tuple[Any, ...]]:
        """Return what each answer tells the guards: status, and the details if there are any."""
        return zip(self.status_N.tolist(), *(self.details or ()), strict=True)


def requests(chance: np.random.Generator, count: int, effect: float, kinds: frozenset[str]) -> Requests:
    """Draw `count` requests; the canary's mean reward is the baseline's plus `effect` at every moment.

    `kinds` are of `drift`, `clusters`, `feedback` and `faults`: rewards with the time of day, users with many
    requests and tastes of their own, ratings that are missing or late, outcomes and times for all guards.
    """
    user_N = np.arange(count)
    level_N = np.full(count, LEVEL)
    if "clusters" in kinds:
        sizes = chance.permutation(np.arange(1, count + 1.0) ** -POWER)
        user_N = chance.choice(count, count, p=sizes / sizes.sum())
        level_N = chance.uniform(2 * LEVEL - 1, 1, count)[user_N]
    if "drift" in kinds:
        phase = chance.uniform(0, 2 * np.pi)
        level_N = level_N - SWING * (1 + np.sin(2 * np.pi * np.arange(count) / DAY + phase)) / 2
    canary_N = (chance.random(count) < WEIGHT)[user_N]
    rate_N = level_N + effect * canary_N
    assert ((rate_N >= 0) & (rate_N <= 1)).all(), "both arms lie in [0, 1], so the effect is exact"
    reward_N = (chance.random(count) < rate_N).astype(float)
    arrives_N = np.arange(count) + 0.5
    if "feedback" in kinds:
        arrives_N = arrives_N + chance.exponential(LATE, count)
        arrives_N[chance.random(count) < MISSING] = np.nan
    status_N = np.where(chance.random(count) < ERRORS, 500, 200)
    details = None
    if "faults" in kinds:
        outcomes = chance.choice(list(OUTCOMES), count, p=list(OUTCOMES.values())).tolist()
        ttft_N, token_N = chance.lognormal(-2, SPREAD, (2, count)).tolist()
        details = outcomes, ttft_N, token_N
    return Requests(user_N, canary_N, status_N, reward_N, arrives_N, details)


def ratings(traffic: Requests) -> np.ndarray:
    """Return the indices of the rated requests in order of arrival."""
    order = np.argsort(traffic.arrives_N, kind="stable")
    return order[: np.count_nonzero(~np.isnan(traffic.arrives_N))]


def events(traffic: Requests) -> list[tuple[int, bool]]:
    """Return what the controller sees, in order: (request, whether it is the rating and not the answer)."""
    rated = ratings(traffic)
    numbers = np.concatenate([np.arange(len(traffic.user_N)), rated])
    moments = np.concatenate([np.arange(len(traffic.user_N), dtype=float), traffic.arrives_N[rated]])
    order = np.argsort(moments, kind="stable")
    is_rating = order >= len(traffic.user_N)
    return list(zip(numbers[order].tolist(), is_rating.tolist(), strict=True))


Rule = Callable[[Requests, float, float], tuple[str, int]]


def fixed_sample(traffic: Requests, alpha: float, margin: float) -> tuple[str, int]:
    """Judge by a z-test for one fixed sample, after every rating."""
    return _z_test(traffic, margin, alpha / 2, 1)


def bonferroni(traffic: Requests, alpha: float, margin: float, looks: int = 10) -> tuple[str, int]:
    """Judge by the z-test at `looks` moments, evenly apart, with the level split among them."""
    rated = len(ratings(traffic))
    return _z_test(traffic, margin, alpha / 2 / looks, max(1, rated // looks))


def _z_test(traffic: Requests, margin: float, level: float, every: int) -> tuple[str, int]:
    """Return the verdict and the number of requests before it; a user counts with the first rating."""
    from scipy.stats import norm

    order = ratings(traffic)
    _, first = np.unique(traffic.user_N[order], return_index=True)
    order = order[np.sort(first)]
    arm_N, reward_N = traffic.canary_N[order], traffic.reward_N[order]
    means, spreads = [], []
    for is_arm_N in (arm_N, ~arm_N):
        n_N = np.maximum(is_arm_N.cumsum(), 1)
        mean_N = (reward_N * is_arm_N).cumsum() / n_N
        means.append(mean_N)
        spreads.append(np.maximum(mean_N * (1 - mean_N), 1 / n_N / 4) / n_N)
    difference_N, error_N = means[0] - means[1], np.sqrt(sum(spreads))
    z = float(norm.isf(level))
    looked_N = (np.arange(1, len(order) + 1) % every == 0) & (arm_N.cumsum() >= 20)
    harm_N = looked_N & (difference_N + z * error_N <= 0)
    clear_N = looked_N & (difference_N - z * error_N >= -margin)
    decided = np.flatnonzero(harm_N | clear_N)
    if not len(decided):
        return "hold", len(traffic.user_N)
    at = int(decided[0])
    return "rollback" if harm_N[at] else "promote", int(np.ceil(traffic.arrives_N[order[at]]))
