"""What phases of a storm say: which warm requests count, their latencies, and the ratios of both arms.

A phase is one plan's answers: warm requests that arrive all the time and, in a storm or its control, a
burst of N, cold in the one and resident in the other, at the same times with the same prompts.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import _record as record
from _answers import Check
from _traffic import Answer
from _verdicts import UNDECIDED, MedianInterval

LEVEL = 0.95
# All of a storm arrive at once, so the longest wait is a whole window: an adapter starves that waits for more
# than so many times the median window.
STARVED = 3.0
# Of alternations, so many may last longer than their warm traffic: their end meets no warm requests.
OUTLIVED = 0.1
RESAMPLES = 400


def percentile(values: Sequence[float], level: float = LEVEL) -> float:
    """Return the smallest value that at least a share `level` of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(level * len(values)) - 1)]


def burst_of(phase: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in phase if answer.ask.burst]


def window(phase: Sequence[Answer]) -> tuple[float, float]:
    """Return when the burst's first request arrived, and when its last first token came."""
    burst = burst_of(phase)
    return min(answer.ask.at for answer in burst), max(answer.first or answer.done for answer in burst)


def seconds_of(phase: Sequence[Answer]) -> float:
    """Return how long the burst took until each of its requests had its first token."""
    start, end = window(phase)
    return end - start


@dataclass(frozen=True)
class Alternation:
    """A storm, its control and traffic without either, one after another."""

    storm: Sequence[Answer]
    control: Sequence[Answer]
    calm: Sequence[Answer]
    # For how long after the burst's arrival warm requests went on to arrive.
    traffic_s: float = math.inf

    @property
    def seconds(self) -> float:
        """Return how long the slower arm took until each of its burst had its first token."""
        return max(seconds_of(arm) for arm in (self.storm, self.control) if arm)

    @property
    def outlived_traffic(self) -> bool:
        """Say whether its end met no warm requests."""
        return self.seconds > self.traffic_s

    def counted(self) -> tuple[list[float], list[float]]:
        """Return the warm requests' times to the first token in both arms, of the same requests.

        Those count that arrive between the first cold arrival and the last cold first token.
        """
        start, end = window(self.storm)
        arms = (self.storm, self.control)
        return tuple(  # type: ignore[return-value]
            [a.ttft for a in arm if not a.ask.burst and start <= a.ask.at <= end] for arm in arms
        )

    def answers(self) -> list[Answer]:
        return [*self.storm, *self.control, *self.calm]


@dataclass
class Arms:
    """All alternations with one number of cold adapters: each counts, whatever came out."""

    alternations: list[Alternation] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def longest_cold_s(self) -> float:
        return max(answer.ttft for one in self.alternations for answer in burst_of(one.storm))

    @property
    def outlived(self) -> int:
        """Return how many alternations lasted longer than their warm traffic."""
        return sum(one.outlived_traffic for one in self.alternations)

    @property
    def window_s(self) -> float:
        """Return the median seconds from the cold arrivals to the last cold first token."""
        return record.median([seconds_of(one.storm) for one in self.alternations])

    @property
    def counted(self) -> int:
        """Return how many warm requests count in each arm."""
        return sum(len(one.counted()[0]) for one in self.alternations)

    def pairs(self) -> dict[str, list[float]]:
        """Return each alternation's `ratio`, warm p95 in the storm over that in its control, and burst's.

        `ready_over_warm` is the cold seconds to all first tokens over the resident ones.
        """
        warm = [one.counted() for one in self.alternations]
        ready = [seconds_of(one.storm) / seconds_of(one.control) for one in self.alternations if one.control]
        ratios = [percentile(storm) / percentile(control) for storm, control in warm if storm and control]
        return {"ratio": ratios, "ready_over_warm": ready}

    def is_decided(self, bounds: record.Bounds) -> bool:
        """Say whether the interval of each of these figures lies on one side of its bound."""
        found = self.pairs()
        says = [
            MedianInterval(found[name]).now().says(bound.least, bound.most) for name, bound in bounds.items()
        ]
        return UNDECIDED not in says

    def over_calm(self, chosen: Sequence[Alternation], side: int = 0) -> float:
        """Return warm p95 in storms over warm p95 without any; with `side` 1 that in controls."""
        burst = [value for one in chosen for value in one.counted()[side]]
        calm = [answer.ttft for one in chosen for answer in one.calm]
        return percentile(burst) / percentile(calm) if burst and calm else math.nan

    def control_over_calm(self, chosen: Sequence[Alternation]) -> float:
        """Return warm p95 in controls over warm p95 without a burst: what N resident requests do alone."""
        return self.over_calm(chosen, side=1)

    def spread(self, figure: Callable[[Sequence[Alternation]], float]) -> str:
        """Return the 5th and 95th percentile of a figure over alternations drawn with replacement."""
        chance, known = random.Random(1), self.alternations
        drawn = [figure(chance.choices(known, k=len(known))) for _ in range(RESAMPLES)]
        drawn = [value for value in drawn if not math.isnan(value)]
        return record.spread([percentile(drawn, 0.05), percentile(drawn, 0.95)]) if drawn else ""

    def figures(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the figures of all alternations and their spreads, by plain names."""
        found: dict[str, Callable[[Sequence[Alternation]], float]] = {
            "over_calm": self.over_calm, "control_over_calm": self.control_over_calm,
        }  # fmt: skip
        values = {name: figure(self.alternations) for name, figure in found.items()}
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        spreads = {name: self.spread(found[name]) for name in values}
        cold = [answer.ttft for one in self.alternations for answer in burst_of(one.storm)]
        resident = [answer.ttft for one in self.alternations for answer in burst_of(one.control)]
        storm, control = ([v for one in self.alternations for v in one.counted()[side]] for side in (0, 1))
        calm = [answer.ttft for one in self.alternations for answer in one.calm]
        times = {"storm": storm, "control": control, "calm": calm}
        for name, each in times.items():
            if each:
                values[f"warm_p50_s_{name}"], values[f"warm_p95_s_{name}"] = (
                    percentile(each, level) for level in (0.5, LEVEL)
                )
        values |= {
            "ready_cold_s": self.window_s,
            "longest_cold_s": self.longest_cold_s,
            "longest_cold_over_window": self.longest_cold_s / self.window_s,
            "median_cold_s": percentile(cold, 0.5),
            "counted": float(self.counted),
            "alternations": float(len(self.alternations)),
            "outlived": float(self.outlived),
        }
        if resident:
            controls = [seconds_of(one.control) for one in self.alternations]
            values |= {"ready_resident_s": record.median(controls), "longest_resident_s": max(resident)}
        return values, spreads


def errors(answers: Iterable[Answer]) -> int:
    """Return how many requests did not end in 200 with every token."""
    return sum(not answer.is_right for answer in answers)


def refusals(answers: Iterable[Answer]) -> int:
    """Return how many 429s there were; each request went on until it was answered."""
    return sum(answer.refused for answer in answers)


def faults(name: str, arms: Arms) -> list[str]:
    """Return why a run's figures do not count, a sentence each."""
    found = []
    if arms.outlived > max(1, OUTLIVED * len(arms.alternations)):
        found.append(f"{name}: {arms.outlived} alternations lasted longer than their warm traffic.")
    if arms.alternations and arms.longest_cold_s > STARVED * arms.window_s:
        waits = f"{arms.longest_cold_s:.2f} s, and a storm {arms.window_s:.2f} s in the median"
        found.append(f"{name}: a cold adapter starved: it waited {waits}.")
    for one in arms.alternations:
        asked = [[(a.ask.at, a.ask.prompt, a.ask.tokens) for a in arm] for arm in (one.storm, one.control)]
        if one.control and asked[0] != asked[1]:
            found.append(f"{name}: a storm and its control were not the same requests.")
    return found
