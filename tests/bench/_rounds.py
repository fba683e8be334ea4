"""What rounds of both modes say: figures, where their time went, and whether they did the same work."""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import _record as record
from _account import OTHER, Account

PHASES = ("rollout", "reward", "update", "handoff", "score")
# Of a frozen suite.
ITEMS = 200


@dataclass(frozen=True)
class Round:
    """What one mode needed for one repeat; `scores` and `digests` are each policy's."""

    seconds: float
    account: Account
    peak: int
    scores: tuple[float, ...]
    digests: tuple[str, ...]

    @property
    def cpu(self) -> float:
        return sum(self.account.used().values())


def compared(sequential: Sequence[Round], concurrent: Sequence[Round]) -> dict[str, list[float]]:
    """Return each figure's values over the repeats, by the definitions of docs/benchmarks/concurrency.md."""
    pairs = list(zip(sequential, concurrent, strict=True))
    cores = len(os.sched_getaffinity(0))
    utilisation = [s.cpu / (cores * s.seconds) for s in sequential]
    speedup = [s.seconds / c.seconds for s, c in pairs]
    engines = [(s.account.used()["engine"], c.account.used()["engine"]) for s, c in pairs]
    return {
        "sequential_s": [s.seconds for s in sequential],
        "concurrent_s": [c.seconds for c in concurrent],
        "speedup": speedup,
        "utilisation_sequential": utilisation,
        "utilisation_concurrent": [c.cpu / (cores * c.seconds) for c in concurrent],
        "share_of_bound": [one * u for one, u in zip(speedup, utilisation, strict=True)],
        # By this the work of all processes shrank, because engine steps held more rows.
        "speedup_by_shared_steps": [
            s.cpu / (s.cpu - before + after) for (s, _), (before, after) in zip(pairs, engines, strict=True)
        ],
        "equal_adapters": [float(s.digests == c.digests) for s, c in pairs],
        "reward_gap": [abs(statistics.fmean(s.scores) - statistics.fmean(c.scores)) for s, c in pairs],
        "reward_spread_of_seeds": [spread_of([statistics.fmean(s.scores) for s in sequential])],
    }


def faults(base: str, sequential: Sequence[Round], concurrent: Sequence[Round]) -> list[str]:
    """Return why the modes did not do the same work, a sentence each.

    Scores differ when they do by more than the seeds' spread, and by more than two standard errors of the
    difference of two shares of a repeat's items, at most sqrt(0.5 / n).
    """
    pairs, policies = list(zip(sequential, concurrent, strict=True)), len(sequential[0].scores)
    found = []
    if base == "tiny-dense" and any(s.digests != c.digests for s, c in pairs):
        found.append(f"{base}, {policies} policies: adapters differ between the modes.")
    means = [(statistics.fmean(s.scores), statistics.fmean(c.scores)) for s, c in pairs]
    gap = record.median([abs(s - c) for s, c in means])
    noise = 2 * math.sqrt(0.5 / (ITEMS * policies))
    if gap > (limit := max(noise, spread_of([s for s, _ in means]))):
        found.append(f"{base}, {policies} policies: scores differ by {gap:.3f}, more than {limit:.3f}.")
    return found


def spread_of(values: Sequence[float]) -> float:
    return max(values) - min(values)


def where_time_goes(mode: str, rounds: Sequence[Round]) -> dict[str, float]:
    """Return each phase's wall and CPU seconds, and each process's CPU seconds; medians over the repeats."""
    found: dict[str, list[float]] = {}
    for one in rounds:
        wall, cpu = one.account.wall(), one.account.by_phase()
        # What no phase of any policy covers: preparation, imports, what waits for a turn.
        for phase in PHASES:
            found.setdefault(f"{mode}.{phase}.wall_s", []).append(wall.get(phase, 0.0))
            found.setdefault(f"{mode}.{phase}.cpu_s", []).append(cpu.get(phase, 0.0))
        found.setdefault(f"{mode}.{OTHER}.cpu_s", []).append(cpu.get(OTHER, 0.0))
        for name, seconds in one.account.used().items():
            found.setdefault(f"{mode}.process.{name}.cpu_s", []).append(seconds)
    return {name: record.median(values) for name, values in found.items()}
