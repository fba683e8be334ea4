"""The guards of a canary: each judges one figure of both arms, over all units or without some keys' units.

A guard finds `harm` (roll back), is `clear` (worse by no more than its margin) or still `open`. Units are
clusters: a user counts once in a step, with the mean of the values, however many requests there were.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.quality.quantiles import quantile_interval
from engine.quality.rates import log_evidence
from engine.quality.sequential import CanaryComparison, Unit

State = Literal["harm", "clear", "open"]
# Latency is judged at this quantile, once the canary has answered this many units: its first ones meet an
# empty prefix cache.
QUANTILE, WARM_UNITS = 0.9, 10
# A verdict must hold without each of the largest keys, and without all others together.
LARGEST_KEYS = 20
ONE_KEY = "All came by one API key, whose owner is trusted."


@dataclass(frozen=True)
class GuardResult:
    """What a guard says: its state, the interval of its figure, the units behind it, and the rule.

    The figure is canary - baseline for rewards and rates, canary / baseline for times. `required` says that
    a promotion needs it clear. `note` is on keys: that only one was there, or which one decides alone.
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

    def sentence(self) -> str:
        """Return the result in words."""
        figure = f"{self.guard}: canary {'/' if self.is_ratio else '-'} baseline"
        units = f"after {self.canary_units} canary and {self.baseline_units} baseline units"
        said = f"{figure} lies between {self.lower:+.3f} and {self.upper:+.3f} {units} ({self.rule})."
        return f"{said} {self.note}".rstrip()

    @property
    def is_ratio(self) -> bool:
        """Whether the figure is a quotient."""
        return self.guard in ("ttft", "token_time")


class Guard:
    """What all guards share: the units of the current step by key and name, and the check without keys."""

    def __init__(self, name: str, required: bool):
        self.name, self.required = name, required
        self.units: list[Unit] = []
        # Values that came after their step had ended; they count in no step.
        self.late = 0
        # By arm, the number of units and the sum of their means.
        self.counts, self.sums = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        self._step, self._step_units = -1, 0
        self._known: dict[tuple[str, str], Unit] = {}
        self._keys: Counter[str] = Counter()
        self._judged: GuardResult | None = None

    def add(self, step: int, key: str, unit: str, is_canary: bool, value: float) -> None:
        """Add a value of a unit; in each step a unit belongs to the arm that first answered it.

        Steps only grow: a value of an earlier one is late.
        """
        if step < self._step:
            self.late += 1
            return
        self._judged = None
        if step > self._step:
            self._step, self._step_units, self._known = step, 0, {}
        known = self._known.get((key, unit))
        if known is None:
            new = self._known[key, unit] = Unit(step, key, is_canary, value)
            self.units.append(new)
            self.counts[is_canary] += 1
            self._step_units += is_canary
            self._keys[key] += 1
            self.sums[is_canary] += value
            self._take(new)
        elif known.is_canary == is_canary:
            self.sums[is_canary] -= known.value
            known.total, known.count = known.total + value, known.count + 1
            self.sums[is_canary] += known.value
            self._repeat(known, value)

    def judge(self) -> GuardResult:
        """Return what the guard says now; a verdict that hangs on one key alone stays open."""
        if self._judged is None:
            self._judged = self._judge()
        return self._judged

    def _judge(self) -> GuardResult:
        state, note = self._state(), ""
        if state != "open":
            groups = key_groups(self._keys)
            alone = [group for group in groups if self._state_without(group) != state] if groups[1:] else []
            if alone:
                state, note = "open", f"It hangs on {_said(alone[0])} alone; without it there is no {state}."
            elif not groups[1:]:
                note = ONE_KEY
        lower, upper = self._interval()
        canary, baseline = self.counts[True], self.counts[False]
        return GuardResult(
            self.name, state, lower, upper, canary, baseline, self._rule(), self.required, note
        )

    def canary_units(self, step: int) -> int:
        """Return how many units of the canary the newest step, `step`, has."""
        return self._step_units if step == self._step else 0

    def mean(self, arm: bool) -> float | None:
        """Return the mean of an arm's units, or None while it has none."""
        return self.sums[arm] / self.counts[arm] if self.counts[arm] else None

    def _take(self, unit: Unit) -> None: ...

    def _repeat(self, unit: Unit, value: float) -> None: ...

    def _state(self) -> State:
        raise NotImplementedError

    def _state_without(self, keys: Collection[str]) -> State:
        raise NotImplementedError

    def _interval(self) -> tuple[float, float]:
        raise NotImplementedError

    def _rule(self) -> str:
        raise NotImplementedError


class RewardGuard(Guard):
    """Rewards in [0, 1], by the betting confidence sequence: harm below 0, clear above -margin."""

    def __init__(self, weights: dict[int, float], alpha: float, margin: float):
        super().__init__("reward", required=True)
        self._weights, self._alpha, self._margin = weights, alpha, margin
        self.comparison = CanaryComparison(weights, alpha, margin)

    def _take(self, unit: Unit) -> None:
        self.comparison.update([unit])

    def _state(self) -> State:
        return self._of(self.comparison)

    def _of(self, comparison: CanaryComparison) -> State:
        if comparison.upper <= 0:
            return "harm"
        return "clear" if comparison.lower >= -self._margin else "open"

    def _state_without(self, keys: Collection[str]) -> State:
        comparison = CanaryComparison(self._weights, self._alpha, self._margin, only_limits=True)
        comparison.update(unit for unit in self.units if unit.key not in keys)
        return self._of(comparison)

    def _interval(self) -> tuple[float, float]:
        return self.comparison.lower, self.comparison.upper

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
        self._weights, self._alpha, self._share, self._margin = weights, alpha, share, margin
        self._comparison = CanaryComparison(weights, alpha, margin)
        # Units with a fault by (step, key, arm), and which arms have one at all.
        self._faults: Counter[tuple[int, str, bool]] = Counter()
        self._fresh: list[Unit] = []

    def _take(self, unit: Unit) -> None:
        self._fresh.append(unit)
        self._faults[unit.step, unit.key, unit.is_canary] += unit.total > 0

    def _repeat(self, unit: Unit, value: float) -> None:
        # Its first fault only.
        self._faults[unit.step, unit.key, unit.is_canary] += 0 < value == unit.total

    def _state(self) -> State:
        if self.required:
            self._catch_up()
        return self._of(self._comparison, ())

    def _of(self, comparison: CanaryComparison, without: Collection[str]) -> State:
        by_weight: dict[float, list[int]] = {}
        for (step, key, is_canary), faults in self._faults.items():
            if faults and key not in without:
                by_weight.setdefault(self._weights[step], [0, 0])[not is_canary] += faults
        faults_seen = {weight: (canary, baseline) for weight, (canary, baseline) in by_weight.items()}
        if log_evidence(faults_seen) >= math.log(1 / self._share):
            return "harm"
        return "clear" if self.required and comparison.upper <= self._margin else "open"

    def _state_without(self, keys: Collection[str]) -> State:
        comparison = CanaryComparison(self._weights, self._alpha, self._margin, only_limits=True)
        if self.required:
            comparison.update(unit for unit in self.units if unit.key not in keys)
        return self._of(comparison, keys)

    def _interval(self) -> tuple[float, float]:
        self._catch_up()
        return self._comparison.lower, self._comparison.upper

    def _catch_up(self) -> None:
        self._comparison.update(self._fresh)
        self._fresh = []

    def _rule(self) -> str:
        return f"mixture of binomials at level {self._share:.3g}, margin {self._margin:g}"


class LatencyGuard(Guard):
    """Seconds at the quantile `QUANTILE`, by ranks: harm above the baseline's by more than `margin` of it.

    Each unit counts with its first answer of the current step, after the canary's first `WARM_UNITS`. `share`
    is this guard's error budget for one step. Where `is_judged` is false it reports only.
    """

    def __init__(self, name: str, required: bool, share: float, margin: float, is_judged: bool):
        super().__init__(name, required)
        self._share, self._margin, self._is_judged = share, margin, is_judged
        self._first: list[tuple[str, bool, float]] = []
        self._taken_step = -1

    def _take(self, unit: Unit) -> None:
        if unit.step != self._taken_step:
            self._taken_step, self._first = unit.step, []
        if self.counts[True] > WARM_UNITS:
            self._first.append((unit.key, unit.is_canary, unit.total))

    def _state(self) -> State:
        return self._state_without(())

    def _state_without(self, keys: Collection[str]) -> State:
        lower, upper = self._ratio(keys)
        if not self._is_judged:
            return "open"
        if lower > 1 + self._margin:
            return "harm"
        return "clear" if self.required and upper <= 1 + self._margin else "open"

    def _interval(self) -> tuple[float, float]:
        return self._ratio(())

    def _ratio(self, without: Collection[str]) -> tuple[float, float]:
        arms = [
            np.array([value for key, arm, value in self._first if arm is wanted and key not in without])
            for wanted in (True, False)
        ]
        (low, high), (base_low, base_high) = (
            quantile_interval(arm, QUANTILE, self._share / 2) for arm in arms
        )
        return low / base_high if base_high else 0.0, high / base_low if base_low else math.inf

    def _rule(self) -> str:
        judged = f"margin {self._margin:g}" if self._is_judged else "reported only: the baseline is the base"
        return f"ranks at the {QUANTILE:.0%} quantile, level {self._share:.3g}, {judged}"


def key_groups(sizes: Counter[str]) -> list[set[str]]:
    """Return the sets of keys that are left out in turn: the largest singly, the others together."""
    ordered = [key for key, _ in sizes.most_common()]
    others = set(ordered[LARGEST_KEYS:])
    return [{key} for key in ordered[:LARGEST_KEYS]] + ([others] if others else [])


def _said(keys: Collection[str]) -> str:
    return f"key {min(keys)[:12]}" if len(keys) == 1 else f"the {len(keys)} smaller keys"
