"""The guards of a canary: each judges one figure of both arms, over all units or without some keys' units.

A guard finds `harm` (roll back), is `clear` (worse by no more than its margin) or still `open`. Units are
clusters: a user counts once in a step, with the mean of the values, however many requests there were.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from engine.quality.quantiles import QuantileSequence
from engine.quality.rates import log_evidence
from engine.quality.sequential import CanaryComparison, PairedComparison, Unit

# Guards whose figure is a quotient of the arms.
RATIOS = frozenset({"ttft", "token_time", "length", "cost"})
State = Literal["harm", "clear", "open"]
# A value as a guard takes it: step, key, unit, whether it is the canary's, and the figure.
Value = tuple[int, str, str, bool, float]
# Times and sizes are judged at this quantile, once the canary has answered this many units: its first ones
# meet an empty prefix cache.
QUANTILE, WARM_UNITS = 0.9, 10
# A verdict must hold without each of the largest keys, and without all others together.
LARGEST_KEYS = 20
ONE_KEY = "All came by one API key, whose owner is trusted."


@dataclass(frozen=True)
class GuardResult:
    """What a guard says: its state, the interval of its figure, the units behind it, and the rule.

    The figure is canary - baseline for rewards and rates, canary / baseline for times and sizes. `required`
    says that a promotion needs it clear. `note` is on keys: that only one was there, or which one decides
    alone. `evaluator` is whose scores it judges. A paired figure is of two answers to the same question, of
    which no user saw the revision's.
    """

    guard: str
    state: State
    lower: float
    upper: float
    canary_units: int
    baseline_units: int
    rule: str
    required: bool = False
    note: str = ""
    evaluator: str = ""
    is_paired: bool = False

    def sentence(self) -> str:
        """Return the result in words."""
        is_worse = self.evaluator and self.state == "harm"
        name = f"Worse by {self.evaluator}" if is_worse else self.guard
        arm, units = "canary", f"{self.canary_units} canary and {self.baseline_units} baseline units"
        if self.is_paired:
            arm, units = "revision", f"{self.canary_units} pairs"
        figure, units = f"{name}: {arm} {'/' if self.is_ratio else '-'} baseline", f"after {units}"
        said = f"{figure} lies between {self.lower:+.3f} and {self.upper:+.3f} {units} ({self.rule})."
        return f"{said} {self.note}".rstrip()

    @property
    def is_ratio(self) -> bool:
        """Whether the figure is a quotient."""
        return self.guard in RATIOS


class GuardResults:
    """What the guards of a canary or a shadow say together: the base of dataclasses that have these fields.

    Those of `observed` decide nothing.
    """

    guards: tuple[GuardResult, ...]
    observed: tuple[GuardResult, ...]

    @property
    def harm(self) -> GuardResult | None:
        """The first guard that found harm."""
        return next((guard for guard in self.guards if guard.state == "harm"), None)

    @property
    def is_clear(self) -> bool:
        """Whether there are guards that must be clear, and all of them are."""
        return bool(self.required) and all(guard.state == "clear" for guard in self.required)

    @property
    def required(self) -> list[GuardResult]:
        """The guards that must be clear."""
        return [guard for guard in self.guards if guard.required]

    def summary(self) -> dict[str, Any]:
        """Return the result for a row of JSON, which knows no infinity: a bound that is not known is None."""
        row: dict[str, Any] = asdict(cast(Any, self))
        for guard in (*row["guards"], *row.get("segments", ()), *row["observed"]):
            guard["upper"] = guard["upper"] if guard["upper"] < math.inf else None
        return row


class Guard:
    """What all guards share: the units of the current step by key and name, and the check without keys.

    A value is taken in constant time. Once the guard finds something it keeps a twin for each group of keys
    that is left out, which takes the values of all others.
    """

    # The means of both arms, of the guards that compare these.
    comparison: PairedComparison

    def __init__(self, name: str, required: bool, evaluator: str = ""):
        self.name, self.required, self.evaluator = name, required, evaluator
        # The state over all keys.
        self.found: State = "open"
        # Values that came after their step had ended; they count in no step.
        self.late = 0
        # By arm, the number of units and the sum of their means.
        self.counts, self.sums = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        self._step, self._step_units = -1, 0
        self._known: dict[tuple[str, str], Unit] = {}
        self._keys: Counter[str] = Counter()
        self._values: list[Value] = []
        # By keys and whether these alone are kept: the twin, and how many of the values it has seen.
        self._twins: dict[tuple[frozenset[str], bool], tuple[Guard, int]] = {}
        self._checked: tuple[State, str] | None = None

    def add(self, step: int, key: str, unit: str, is_canary: bool, value: float) -> None:
        """Add a value of a unit; in each step a unit belongs to the arm that first answered it.

        Steps only grow: a value of an earlier one is late.
        """
        if step < self._step:
            self.late += 1
            return
        self._checked = None
        self._values.append((step, key, unit, is_canary, value))
        self._count(step, key, unit, is_canary, value)

    def _count(self, step: int, key: str, unit: str, is_canary: bool, value: float) -> None:
        if step > self._step:
            self._step, self._step_units, self._known = step, 0, {}
            self._start_step()
        known = self._known.get((key, unit))
        if known is None:
            new = self._known[key, unit] = Unit(step, key, is_canary, value)
            self.counts[is_canary] += 1
            self._step_units += is_canary
            self._keys[key] += 1
            self.sums[is_canary] += value
            self._take(new)
            self.found = self._state()
        elif known.is_canary == is_canary:
            self.sums[is_canary] -= known.value
            known.total, known.count = known.total + value, known.count + 1
            self.sums[is_canary] += known.value
            self._repeat(known, value)
            self.found = self._state()

    def judge(self) -> GuardResult:
        """Return what the guard says now; a verdict that hangs on one key alone stays open."""
        if self._checked is None:
            self._checked = self._check()
        lower, upper = self._interval()
        canary, baseline = self.counts[True], self.counts[False]
        state, note = self._checked
        return GuardResult(
            self.name, state, lower, upper, canary, baseline, self._rule(), self.required, note,
            self.evaluator,
        )  # fmt: skip

    def canary_units(self, step: int) -> int:
        """Return how many units of the canary the newest step, `step`, has."""
        return self._step_units if step == self._step else 0

    def mean(self, arm: bool) -> float | None:
        """Return the mean of an arm's units, or None while it has none."""
        return self.sums[arm] / self.counts[arm] if self.counts[arm] else None

    def _check(self) -> tuple[State, str]:
        """Return the state, which must hold without any one key, and what there is to say about keys."""
        state = self.found
        if state == "open":
            return state, ""
        if len(self._keys) == 1:
            return state, ONE_KEY
        largest = [key for key, _ in self._keys.most_common(LARGEST_KEYS)]
        groups = [(frozenset({key}), False) for key in largest]
        if others := len(self._keys) - len(largest):
            groups.append((frozenset(largest), True))
        self._twins = {group: self._twin(*group) for group in groups}
        for keys, are_kept in groups:
            if self._twins[keys, are_kept][0].found != state:
                said = f"the {others} smaller keys" if are_kept else f"key {min(keys)[:12]}"
                return "open", f"It hangs on {said} alone; without it there is no {state}."
        return state, ""

    def _twin(self, keys: frozenset[str], are_kept: bool) -> tuple["Guard", int]:
        """Return the twin that keeps these keys, or leaves them out, with all values so far."""
        twin, seen = self._twins.get((keys, are_kept)) or (self._empty(), 0)
        for number in range(seen, len(self._values)):
            value = self._values[number]
            if (value[1] in keys) == are_kept:
                twin._count(*value)
        return twin, len(self._values)

    def _start_step(self) -> None: ...

    def _take(self, unit: Unit) -> None:
        self.comparison.add(unit)

    def _repeat(self, unit: Unit, value: float) -> None: ...

    def _empty(self) -> "Guard":
        """Return a guard of the same settings that has seen nothing."""
        raise NotImplementedError

    def _state(self) -> State:
        raise NotImplementedError

    def _interval(self) -> tuple[float, float]:
        return self.comparison.lower, self.comparison.upper

    def _rule(self) -> str:
        raise NotImplementedError


class RewardGuard(Guard):
    """Rewards in [0, 1], or an evaluator's scores, by the betting confidence sequence at level `alpha`.

    Harm is below 0, and clear above -margin; each is wrong with probability at most alpha / 2.
    """

    def __init__(
        self, weights: dict[int, float], alpha: float, margin: float, name: str = "reward",
        required: bool = False, evaluator: str = "",
    ):  # fmt: skip
        super().__init__(name, required, evaluator)
        self._weights, self._alpha, self._margin = weights, alpha, margin
        self.comparison = CanaryComparison(weights, alpha, above=-margin, below=0.0)

    def _empty(self) -> Guard:
        return RewardGuard(self._weights, self._alpha, self._margin)

    def _state(self) -> State:
        if self.comparison.is_below:
            return "harm"
        return "clear" if self.comparison.is_above else "open"

    def _rule(self) -> str:
        return f"betting confidence sequence at level {self._alpha:g}, margin {self._margin:g}"


class RateGuard(Guard):
    """Rates of faults, 1 for a request with one: harm by the mixture of binomials at level `share`.

    It is clear once the betting confidence sequence at `alpha` shows that the rate is above the baseline's by
    at most `margin`; that is followed only where a promotion requires it.
    """

    def __init__(
        self, name: str, required: bool, weights: dict[int, float], alpha: float, share: float, margin: float
    ):
        super().__init__(name, required)
        self._weights, self._alpha, self.share, self._margin = weights, alpha, share, margin
        self.comparison = CanaryComparison(weights, alpha, above=0.0, below=margin)
        # By the canary's weight, how many units of the canary and of the baseline had a fault.
        self._faults: dict[float, tuple[int, int]] = {}
        self._is_harm = False

    def _empty(self) -> Guard:
        return RateGuard(self.name, self.required, self._weights, self._alpha, self.share, self._margin)

    def _take(self, unit: Unit) -> None:
        super()._take(unit)
        if unit.total > 0:
            self._add_fault(unit)

    def _repeat(self, unit: Unit, value: float) -> None:
        # Its first fault only.
        if 0 < value == unit.total:
            self._add_fault(unit)

    def _add_fault(self, unit: Unit) -> None:
        weight = self._weights[unit.step]
        canary, baseline = self._faults.get(weight, (0, 0))
        self._faults[weight] = canary + unit.is_canary, baseline + (not unit.is_canary)
        self._is_harm = self._is_harm or log_evidence(self._faults) >= math.log(1 / self.share)

    def _state(self) -> State:
        if self._is_harm:
            return "harm"
        return "clear" if self.required and self.comparison.is_below else "open"

    def _rule(self) -> str:
        return f"mixture of binomials at level {self.share:.3g}, margin {self._margin:g}"


class QuantileGuard(Guard):
    """A figure at the quantile `QUANTILE`, by ranks: harm above the baseline's by more than `margin` of it.

    Each unit counts with its first answer of the current step, after the canary's first `WARM_UNITS`. `share`
    is this guard's error budget for one step. Where `is_judged` is false it reports only.
    """

    def __init__(self, name: str, required: bool, share: float, margin: float, is_judged: bool):
        super().__init__(name, required and is_judged)
        self.share, self._margin, self._is_judged = share, margin, is_judged
        self._start_step()

    def _empty(self) -> Guard:
        return QuantileGuard(self.name, self.required, self.share, self._margin, self._is_judged)

    def _start_step(self) -> None:
        self._arms = {arm: QuantileSequence(QUANTILE, self.share / 2) for arm in (True, False)}

    def _take(self, unit: Unit) -> None:
        if self.counts[True] > WARM_UNITS:
            self._arms[unit.is_canary].add(unit.total)

    def _state(self) -> State:
        if not self._is_judged:
            return "open"
        lower, upper = self._interval()
        if lower > 1 + self._margin:
            return "harm"
        return "clear" if self.required and upper <= 1 + self._margin else "open"

    def _interval(self) -> tuple[float, float]:
        canary, baseline = self._arms[True], self._arms[False]
        return (
            canary.lower / baseline.upper if baseline.upper else 0.0,
            canary.upper / baseline.lower if baseline.lower else math.inf,
        )

    def _rule(self) -> str:
        judged = f"margin {self._margin:g}" if self._is_judged else "reported only: the baseline is the base"
        return f"ranks at the {QUANTILE:.0%} quantile, level {self.share:.3g}, {judged}"
