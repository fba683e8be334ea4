"""A canary's evidence: every answer, rating and score of both arms, and what the guards say about them.

The error budget: a canary that is no worse is rolled back with probability at most `alpha`, over all guards
and looks. Without evaluators the ratings' guards have all of it, else their part (see `budget`): the reward's
guard half, the others share the rest; without feedback they share all of the part. A promotion needs every
required guard clear, so that none of its errors adds to another's. What is only observed has no part in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.quality.budget import ErrorBudget
from engine.quality.guards import (
    RATIOS,
    Guard,
    GuardResult,
    GuardResults,
    QuantileGuard,
    RateGuard,
    RewardGuard,
)
from engine.settings.releases import GUARDS, GuardName, ReleaseConfig, score_guard

# Statuses from here on are errors of engine or adapter; below, the user's own.
SERVER_ERROR = 500
# Segments with figures of their own; further ones are put together.
MOST_SEGMENTS, OTHER_SEGMENTS = 20, "(others)"
# Harm is a quantile above the baseline's by more than this share: of times, and of lengths and costs.
LATENCY_MARGIN, COST_MARGIN = 0.5, 1.0
# The outcomes of an answer that are faults.
FAULTS: tuple[GuardName, ...] = ("invalid", "refused", "truncated")


class CanaryAnswer(NamedTuple):
    """One observed answer. `outcome` is `ok`, `invalid`, `refused` or `truncated`, None where nobody looked.

    Times in seconds; the first two are None where the answer was not streamed. `length` is in tokens, `cost`
    in seconds of the engine.
    """

    step: int
    key: str
    unit: str
    is_canary: bool
    status: int = 200
    outcome: str | None = None
    ttft_s: float | None = None
    token_s: float | None = None
    length: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class FeedbackCounts:
    """Answers of both arms and their ratings; `late` came after the step of their answer had ended.

    `doubled` are further ratings of an answer, `foreign` those by another key, `refused` those outside
    [0, 1]: none of them counts.
    """

    answers: int = 0
    rated: int = 0
    late: int = 0
    doubled: int = 0
    foreign: int = 0
    refused: int = 0

    def sentence(self) -> str:
        """Return the counts in words."""
        share = f" ({self.rated / self.answers:.0%})" if self.answers else ""
        ignored = {name: getattr(self, name) for name in ("late", "doubled", "foreign", "refused")}
        said = ", ".join(f"{count} {name}" for name, count in ignored.items() if count)
        return (
            f"{self.rated} of {self.answers} answers were rated{share}{'; ignored: ' if said else ''}{said}."
        )


@dataclass(frozen=True)
class CanaryResult(GuardResults):
    """Judged units and mean rewards of both arms, the bounds of the rewards' difference, and the guards.

    Units are those of the first guard that a promotion needs clear: rated, scored or answered ones;
    `step_units` are the canary's in its newest step. `segments` are reported and decide nothing; those that a
    policy judges are among the guards. `observed` are other guards and evaluators that decide nothing, as far
    as there was anything to see.
    """

    canary_units: int = 0
    baseline_units: int = 0
    canary_reward: float | None = None
    baseline_reward: float | None = None
    pairs: int = 0
    lower: float = -1.0
    upper: float = 1.0
    step_units: int = 0
    guards: tuple[GuardResult, ...] = ()
    segments: tuple[GuardResult, ...] = ()
    feedback: FeedbackCounts = field(default_factory=FeedbackCounts)
    observed: tuple[GuardResult, ...] = ()


class CanaryJudge:
    """Takes a canary's answers, ratings and scores in order of arrival; `result` is what they say so far.

    `weights` maps each step of the canary, the version of its route, to the canary's share of units in it; it
    may grow. Against the bare base (`is_against_base`) times are reported only: an adapter always costs time.
    """

    def __init__(self, settings: ReleaseConfig, weights: dict[int, float], is_against_base: bool):
        self._settings = settings
        self._is_against_base = is_against_base
        self._weights = weights
        budget = ErrorBudget.of(settings)
        has_rewards = settings.feedback != "none" and "reward" in settings.guards
        # The reward's half of the budget is split over all users and the segments that are judged.
        level = (budget.ratings or settings.alpha) / (1 + len(settings.segments))
        self.rewards = self._score_guard("reward", level)
        self._segments = {name: self._score_guard(f"reward in {name}", level) for name in settings.segments}
        others = [name for name in settings.guards if name != "reward"]
        share = (budget.ratings / 2 if has_rewards else budget.ratings) / max(1, len(others))
        self.others: dict[GuardName, Guard] = {name: self._guard(name, share) for name in others}
        # One side of the interval finds harm, and that is what the budget limits: twice the level is both.
        self.evaluators = {
            name: self._score_guard(
                score_guard(name), settings.alpha if one.decides == "nothing" else 2 * budget.evaluator, name
            )
            for name, one in settings.evaluators.items()
        }
        rewards = [self.rewards, *self._segments.values()]
        deciding = [self.evaluators[name] for name in settings.deciding_evaluators]
        self._guards = [*(rewards if has_rewards else ()), *deciding, *self.others.values()]
        self._observed: dict[GuardName, Guard] = {
            name: self._guard(name, settings.alpha) for name in GUARDS if name not in ("reward", *others)
        }

    def _score_guard(self, name: str, level: float, evaluator: str = "") -> RewardGuard:
        settings = self._settings
        required = name in settings.promoting_guards
        return RewardGuard(self._weights, level, settings.margin, name, required, evaluator)

    def _guard(self, name: GuardName, share: float) -> Guard:
        settings, required = self._settings, name in self._settings.promoting_guards
        if name in RATIOS:
            share /= len(settings.weights)
            margin = LATENCY_MARGIN if name in ("ttft", "token_time") else COST_MARGIN
            return QuantileGuard(name, required, share, margin, not self._is_against_base)
        return RateGuard(name, required, self._weights, settings.alpha, share, settings.rate_margin)

    def rate(
        self, step: int, key: str, unit: str, is_canary: bool, reward: float, segment: str | None = None
    ) -> None:
        """Take a rating in [0, 1] of a request in a segment; raises `ValueError` for another reward."""
        if not 0 <= reward <= 1:
            raise ValueError(f"Rewards lie in [0, 1]; found {reward:g}.")
        self.rewards.add(step, key, unit, is_canary, reward)
        if segment is not None:
            self._segment(segment).add(step, key, unit, is_canary, reward)

    def _segment(self, name: str) -> RewardGuard:
        """Return the guard of a segment, which only reports unless the policy asked for it."""
        if name not in self._segments and len(self._segments) >= MOST_SEGMENTS:
            name = OTHER_SEGMENTS
        if name not in self._segments:
            self._segments[name] = self._score_guard(f"reward in {name}", self._settings.alpha)
        return self._segments[name]

    def evaluate(self, name: str, step: int, key: str, unit: str, is_canary: bool, score: float) -> None:
        """Take an evaluator's score of an answer, or a metric; raises `ValueError` outside [0, 1]."""
        if not 0 <= score <= 1:
            raise ValueError(f"Scores lie in [0, 1]; found {score:g} by {name}.")
        is_lower_better = self._settings.evaluators[name].kind == "metric-lower"
        self.evaluators[name].add(step, key, unit, is_canary, 1 - score if is_lower_better else score)

    def observe(self, answer: CanaryAnswer) -> None:
        """Take an answer; each guard counts what it can judge by it."""
        at = answer.step, answer.key, answer.unit, answer.is_canary
        for name, value in _figures(answer):
            if guard := self.others.get(name) or self._observed.get(name):
                guard.add(*at, value)

    @property
    def is_open(self) -> bool:
        """Whether no guard finds anything, not even with all keys; `result` then says `open` of each."""
        return all(guard.found == "open" for guard in self._guards)

    def result(self, feedback: FeedbackCounts | None = None) -> CanaryResult:
        """Return what all guards say now, with counts of the feedback."""
        results = tuple(guard.judge() for guard in self._guards)
        rewards = self.rewards
        counted = next((guard for guard in self._guards if guard.required), [*self._guards, rewards][0])
        return CanaryResult(
            canary_units=counted.counts[True],
            baseline_units=counted.counts[False],
            canary_reward=rewards.mean(True),
            baseline_reward=rewards.mean(False),
            pairs=rewards.comparison.pairs,
            lower=rewards.comparison.lower,
            upper=rewards.comparison.upper,
            step_units=counted.canary_units(max(self._weights)),
            guards=results,
            segments=tuple(
                guard.judge() for name, guard in self._segments.items() if name not in self._settings.segments
            ),
            feedback=feedback or FeedbackCounts(),
            observed=tuple(guard.judge() for guard in self._only_observed() if any(guard.counts.values())),
        )

    def _only_observed(self) -> Iterator[Guard]:
        """Yield the guards that decide nothing."""
        if self.rewards not in self._guards:
            yield self.rewards
        yield from (guard for guard in self.evaluators.values() if guard not in self._guards)
        yield from self._observed.values()


def _figures(answer: CanaryAnswer) -> Iterator[tuple[GuardName, float]]:
    """Yield what an answer tells the guards."""
    yield from faults_of(answer.status, answer.outcome).items()
    measured: dict[GuardName, float | None] = {
        "ttft": answer.ttft_s, "token_time": answer.token_s, "length": answer.length, "cost": answer.cost
    }  # fmt: skip
    yield from ((name, value) for name, value in measured.items() if value is not None)


def faults_of(status: int, outcome: str | None) -> dict[GuardName, float]:
    """Return which faults an answer has, 1 or 0, of those that can be told."""
    failed = status >= SERVER_ERROR
    if failed or outcome is None:
        return {"errors": float(failed)}
    return {"errors": 0.0, **{fault: float(outcome == fault) for fault in FAULTS}}
