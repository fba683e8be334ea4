"""What every benchmark shares: repeats, bounds, a result file, and a table of the figures.

A figure of several bases or sizes has a suffix for each (`ratio.tiny-dense.n32`). Its plain name (`ratio`)
holds the worst.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from _verdicts import MET, MISSED, UNDECIDED, Interval, MedianInterval
from rich.console import Console
from rich.table import Table

from engine.settings.reproducible import VARIABLE

if TYPE_CHECKING:
    from _run import Run

REPORTED = "reported"
# What a figure is not measured from: prose, and the table of figures itself.
PROSE = (":(exclude)docs", ":(exclude)*.md")


@dataclass(frozen=True)
class Bound:
    """The least and the most that a figure may be; the worst of several values has the most `badness`."""

    least: float
    most: float
    badness: Callable[[float], float]

    def holds(self, value: float) -> bool:
        """Say whether a value is within the bound; NaN never is."""
        return self.least <= value <= self.most

    def worst(self, values: Sequence[float]) -> float:
        """Return the worst of some values."""
        return max(values, key=self.badness)

    def __str__(self) -> str:
        if self.least == self.most:
            return f"== {self.most:g}"
        limits = {">=": self.least, "<=": self.most}
        return " and ".join(f"{sign} {n:g}" for sign, n in limits.items() if math.isfinite(n)) or REPORTED


def at_most(limit: float = math.inf) -> Bound:
    """Return an upper bound; without a limit it only says that the largest value is the worst."""
    return Bound(-math.inf, limit, lambda value: value)


def at_least(limit: float = -math.inf) -> Bound:
    """Return a lower bound; without a limit it only says that the smallest value is the worst."""
    return Bound(limit, math.inf, lambda value: -value)


def within(wanted: float, tolerance: float = 0.0) -> Bound:
    """Return a bound on the distance from a value."""
    return Bound(wanted - tolerance, wanted + tolerance, lambda value: abs(value - wanted))


Bounds = Mapping[str, Bound]


@dataclass
class Figures:
    """Figures by name, the spread of those that were repeated, and the intervals of paired ones."""

    values: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, str] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)

    def add(self, repeats: Mapping[str, Sequence[float]], suffix: str = "") -> None:
        """Take the median and the range of each figure's repeats, by its name with the suffix."""
        self.values |= {name + suffix: median(values) for name, values in repeats.items() if values}
        several = {name: values for name, values in repeats.items() if len(values) > 1}
        self.spreads |= {name + suffix: spread(values) for name, values in several.items()}

    def add_pairs(self, pairs: Mapping[str, Sequence[float]], suffix: str = "") -> None:
        """Take figures whose bounds are judged by an interval of the median, in the order of the pairs."""
        self.add(pairs, suffix)
        self.intervals |= {name + suffix: MedianInterval(values).now() for name, values in pairs.items()}


def in_turn(sides: Iterable[str], number: int) -> list[str]:
    """Return the order of a repeat: whoever goes second finds another machine, so each side does."""
    return list(sides)[:: -1 if number % 2 else 1]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Return the range as text: `min..max`."""
    return f"{min(values):.4g}..{max(values):.4g}"


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor()
    torch = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch and torch.cuda.is_available() else ""
    return f"{len(os.sched_getaffinity(0))} cores, {model}{gpu}"


def commit() -> str:
    """Return the short name of the commit, with a plus sign where code differs from it."""
    name = git("rev-parse", "--short", "HEAD")
    return f"{name}+" if name and git("status", "--porcelain", "--", ".", *PROSE) else name or "unknown"


def git(*words: str) -> str:
    run = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def bounds_of(figures: Mapping[str, float], bounds: Bounds) -> dict[str, Bound]:
    """Return each figure's bound: its own, or that of a plain name which has values with suffixes only."""
    found = {}
    for name in figures:
        plain = name.partition(".")[0]
        shared = None if plain in figures else bounds.get(plain)
        if bound := bounds.get(name, shared):
            found[name] = bound
    return found


def worst(figures: Mapping[str, float], bounds: Bounds) -> dict[str, float]:
    """Return the plain names in `bounds` that have values with suffixes only, each with its worst value."""
    found = {}
    for name, bound in bounds.items():
        values = [value for key, value in figures.items() if key.startswith(f"{name}.")]
        if "." not in name and name not in figures and values:
            found[name] = bound.worst(values)
    return found


def verdicts(figures: Figures, bounds: Bounds) -> dict[str, str]:
    """Return what each bounded figure's value, or its interval where it has one, says of its bound."""
    found = {}
    for name, bound in bounds_of(figures.values, bounds).items():
        if name in figures.intervals:
            found[name] = figures.intervals[name].says(bound.least, bound.most)
        else:
            found[name] = MET if bound.holds(figures.values[name]) else MISSED
    return found


def sentences(figures: Figures, bounds: Bounds, wanted: str) -> list[str]:
    """Return a sentence for each figure of which a verdict says `missed`, or `undecided`."""
    known = bounds_of(figures.values, bounds)
    return [
        f"{name} is {figures.values[name]:.4g}{_at(figures, name)}, and its bound is {known[name]}."
        for name, says in verdicts(figures, bounds).items()
        if says == wanted
    ]


def _at(figures: Figures, name: str) -> str:
    found = figures.intervals.get(name)
    return f", 95% in {found} after {found.count}" if found else ""


def report(run: "Run", figures: Figures, bounds: Bounds, correct: bool, directory: Path) -> None:
    """Write `NAME.json` and print each figure; exit with 1 and a line for each figure that misses its bound.

    No figure is written while the correctness check is red, nor after Ctrl-C.
    """
    name = run.name
    if run.is_interrupted:
        if figures.values:
            show(f"bench {name}, interrupted", figures, bounds)
        had = "This is what it had" if figures.values else "It had no figure yet"
        print(f"bench {name}: ended by Ctrl-C. {had}; nothing was written.", file=sys.stderr)
        sys.exit(130)
    if not correct:
        sys.exit(f"bench {name}: the correctness check failed, so no figure counts.")
    if not figures.values:
        sys.exit(f"bench {name}: no repeat ended in the time. --long has more.")
    short, open_ = (sentences(figures, bounds, wanted) for wanted in (MISSED, UNDECIDED))
    directory.mkdir(parents=True, exist_ok=True)
    result = {**worst(figures.values, bounds), **figures.values, "missed": short, "undecided": open_}
    result |= {"rows": rows(figures, bounds), "is_long": run.is_long, "hardware": hardware()}
    result |= {"commit": commit(), "python": platform.python_version()}
    result[VARIABLE] = os.environ.get(VARIABLE, "unset")
    (directory / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    show(f"bench {name}, {hardware()}, {commit()}", figures, bounds)
    print(*(f"bench {name}: undecided: {sentence} --long decides." for sentence in open_), sep="\n")
    if short:
        sys.exit("\n".join(f"bench {name}: {sentence}" for sentence in short))


def rows(figures: Figures, bounds: Bounds) -> list[dict[str, str]]:
    """Return each bounded figure as the tables of docs/benchmarks show it."""
    known, said = bounds_of(figures.values, bounds), verdicts(figures, bounds)
    return [
        {
            "figure": name,
            "bound": str(bound),
            "value": f"{figures.values[name]:.4g}",
            "spread": _spread(figures, name),
            "repeats": str(figures.intervals[name].count) if name in figures.intervals else "",
            "met": {MET: "yes", MISSED: "no", UNDECIDED: UNDECIDED}[said[name]],
        }
        for name, bound in known.items()
        if str(bound) != REPORTED
    ]


def _spread(figures: Figures, name: str) -> str:
    found = figures.intervals.get(name)
    return f"95% in {found}" if found else figures.spreads.get(name, "")


def show(title: str, figures: Figures, bounds: Bounds) -> None:
    """Print the table of figures, and of bounds whose figure this run left out."""
    every = worst(figures.values, bounds) | figures.values
    known, said = {**bounds, **bounds_of(figures.values, bounds)}, verdicts(figures, bounds)
    table = Table("figure", "value", "bound", "verdict", "spread", title=title)
    for key, value in every.items():
        bound = str(known.get(key, REPORTED))
        says = said.get(key, "") if bound != REPORTED else ""
        table.add_row(key, f"{value:.4g}", bound, says, _spread(figures, key))
    for key in (key for key in bounds if key not in every):
        table.add_row(key, "not measured", str(bounds[key]), "", "")
    Console(width=140).print(table)
