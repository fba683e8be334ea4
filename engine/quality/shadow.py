"""The evidence of a shadow: answers of baseline and revision to the same questions, which no user saw.

A unit is asked once, and its two answers are one observation. Scores are compared by their difference, which
needs far fewer units than two arms do where a question decides more about the score than the revision. Of
faults only discordant pairs tell anything: as good a revision has half of them at most. Lengths are compared
by their quantiles; times are not, since nobody waits for the revision's answer and it yields to others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.quality.budget import SHADOWED, ErrorBudget
from engine.quality.canary import COST_MARGIN, faults_of
from engine.quality.guards import Guard, GuardResult, GuardResults, QuantileGuard, RewardGuard, State
from engine.quality.rates import log_evidence
from engine.quality.sequential import PairedComparison, Unit
from engine.settings.releases import GuardName, ReleaseConfig, score_guard


@dataclass(frozen=True)
class ShadowAnswer:
    """One of the two answers. `outcome` as in `CanaryAnswer`; `length` in tokens, `scores` by evaluator.

    An evaluator that gave no score of it is missing there.
    """

    status: int = 200
    outcome: str | None = None
    length: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShadowPair:
    """The two answers to the first question of a unit, which came by an API key."""

    key: str
    unit: str
    revision: ShadowAnswer
    baseline: ShadowAnswer


@dataclass(frozen=True)
class ShadowResult(GuardResults):
    """What a shadow's guards say about `pairs` pairs; those of `observed` decide nothing.

    `units` are the pairs that every deciding evaluator scored: without its scores a shadow shows nothing.
    """

    pairs: int = 0
    units: int = 0
    guards: tuple[GuardResult, ...] = ()
    observed: tuple[GuardResult, ...] = ()


class ShadowJudge:
    """Takes pairs of answers in order of arrival; `result` is what they say so far.

    Against the bare base (`is_against_base`) lengths are reported only.
    """

    def __init__(self, settings: ReleaseConfig, is_against_base: bool):
        self._settings, self._is_against_base = settings, is_against_base
        self._units: set[tuple[str, str]] = set()
        budget = ErrorBudget.of(settings)
        # One side of the interval finds harm, and that is what the budget limits: twice the level is both.
        self._scores = {
            name: PairedScores(name, 2 * budget.paired, settings.margin, True)
            for name in settings.shadow_evaluators
        }
        self._shadowed = {
            name: self._guard(name, budget.shadowed) for name in SHADOWED if name in settings.guards
        }
        self._deciding: list[Guard] = [*self._scores.values(), *self._shadowed.values()]
        only_shown = {
            name: PairedScores(name, settings.alpha, settings.margin, False)
            for name, one in settings.evaluators.items()
            if name not in self._scores and not one.is_metric
        }
        unasked = {name: self._guard(name, settings.alpha) for name in SHADOWED if name not in self._shadowed}
        self._observed: list[Guard] = [*only_shown.values(), *unasked.values()]
        self._scores |= only_shown
        self._shadowed |= unasked

    def _guard(self, name: GuardName, share: float) -> Guard:
        if name == "length":
            return QuantileGuard(name, False, share, COST_MARGIN, not self._is_against_base)
        return DiscordantPairs(name, share)

    def observe(self, pair: ShadowPair) -> None:
        """Take a unit's pair; further ones do not count. Raises `ValueError` for a score outside [0, 1]."""
        revision, baseline, at = pair.revision, pair.baseline, (0, pair.key, pair.unit, True)
        scored = {
            name: (revision.scores[name], baseline.scores[name])
            for name in self._scores
            if name in revision.scores and name in baseline.scores
        }
        for name, scores in scored.items():
            if not all(0 <= score <= 1 for score in scores):
                raise ValueError(f"Scores lie in [0, 1]; found {scores[0]:g} and {scores[1]:g} by {name}.")
        if (pair.key, pair.unit) in self._units:
            return
        self._units.add((pair.key, pair.unit))
        for name, (new, old) in scored.items():
            self._scores[name].add(*at, new - old)
        faults = [faults_of(one.status, one.outcome) for one in (revision, baseline)]
        for name in faults[0].keys() & faults[1].keys():
            self._shadowed[name].add(*at, faults[0][name] - faults[1][name])
        if revision.length is not None and baseline.length is not None:
            lengths = self._shadowed["length"]
            lengths.add(0, pair.key, f"revision {pair.unit}", True, revision.length)
            lengths.add(0, pair.key, f"baseline {pair.unit}", False, baseline.length)

    @property
    def is_open(self) -> bool:
        """Whether no guard finds anything, not even with all keys; `result` then says `open` of each."""
        return all(guard.found == "open" for guard in self._deciding)

    def result(self) -> ShadowResult:
        """Return what all guards say now."""
        return ShadowResult(
            len(self._units),
            min((guard.counts[True] for guard in self._deciding if guard.required), default=0),
            tuple(_paired(guard) for guard in self._deciding),
            tuple(_paired(guard) for guard in self._observed if guard.counts[True]),
        )


class PairedScores(RewardGuard):
    """Differences of an evaluator's scores, revision - baseline, each of them a unit's value."""

    def __init__(self, evaluator: str, alpha: float, margin: float, required: bool):
        super().__init__({}, alpha, margin, score_guard(evaluator), required, evaluator)
        self.comparison = PairedComparison(alpha, above=-margin, below=0.0)

    def _empty(self) -> Guard:
        return PairedScores(self.evaluator, self._alpha, self._margin, self.required)

    def _rule(self) -> str:
        return f"betting confidence sequence of pairs at level {self._alpha:.3g}, margin {self._margin:g}"


class DiscordantPairs(Guard):
    """Pairs of which one answer alone has a fault: harm where the revision's share of them exceeds half.

    It is the mixture of binomials at level `share`, with as many of either answer. Values are 1 for a fault
    of the revision alone, -1 for one of the baseline alone, and 0.
    """

    def __init__(self, name: str, share: float):
        super().__init__(name, required=False)
        self._share = share
        self._alone = {1.0: 0, -1.0: 0, 0.0: 0}
        self.comparison = PairedComparison(share)
        self._is_harm = False

    def _empty(self) -> Guard:
        return DiscordantPairs(self.name, self._share)

    def _take(self, unit: Unit) -> None:
        super()._take(unit)
        self._alone[unit.total] += 1
        evidence = log_evidence({0.5: (self._alone[1.0], self._alone[-1.0])}) if unit.total > 0 else 0.0
        self._is_harm = self._is_harm or evidence >= math.log(1 / self._share)

    def _state(self) -> State:
        return "harm" if self._is_harm else "open"

    def _rule(self) -> str:
        return f"mixture of binomials of discordant pairs at level {self._share:.3g}"


def _paired(guard: Guard) -> GuardResult:
    found = guard.judge()
    return replace(found, is_paired=True, baseline_units=found.canary_units)
