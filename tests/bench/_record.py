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

from rich.console import Console
from rich.table import Table

from engine.settings.reproducible import VARIABLE

REPORTED = "reported"


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
    """Figures by name, and the spread of those that were repeated."""

    values: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, str] = field(default_factory=dict)

    def add(self, repeats: Mapping[str, Sequence[float]], suffix: str = "") -> None:
        """Take the median and the range of each figure's repeats, by its name with the suffix."""
        self.values |= {name + suffix: median(values) for name, values in repeats.items()}
        several = {name: values for name, values in repeats.items() if len(values) > 1}
        self.spreads |= {name + suffix: spread(values) for name, values in several.items()}


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
    return f"{len(os.sched_getaffinity(0))} cores, {model}"


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


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


def missed(figures: Mapping[str, float], bounds: Bounds) -> list[str]:
    """Return a sentence for each figure that is out of its bound."""
    return [
        f"{name} is {figures[name]:.4g}, and its bound is {bound}."
        for name, bound in bounds_of(figures, bounds).items()
        if not bound.holds(figures[name])
    ]


def report(
    name: str,
    figures: Mapping[str, float],
    bounds: Bounds,
    spreads: Mapping[str, str],
    correct: bool,
    directory: Path = Path(".graftwork/bench"),
) -> None:
    """Write `NAME.json` and print each figure; exit with 1 and a line for each figure that misses its bound.

    No figure is written while the correctness check is red.
    """
    if not correct:
        sys.exit(f"bench {name}: the correctness check failed, so no figure counts.")
    short, every = missed(figures, bounds), worst(figures, bounds) | figures
    directory.mkdir(parents=True, exist_ok=True)
    result = {**every, "missed": short, "hardware": hardware(), "commit": commit()}
    result |= {"python": platform.python_version(), VARIABLE: os.environ.get(VARIABLE, "unset")}
    (directory / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    show(f"bench {name}, {hardware()}, {commit()}", every, {**bounds, **bounds_of(figures, bounds)}, spreads)
    if short:
        sys.exit("\n".join(f"bench {name}: {sentence}" for sentence in short))


def show(title: str, figures: Mapping[str, float], bounds: Bounds, spreads: Mapping[str, str]) -> None:
    """Print the table of figures, and of bounds whose figure this run left out."""
    table = Table("figure", "value", "bound", "spread", title=title)
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}", str(bounds.get(key, REPORTED)), spreads.get(key, ""))
    for key in (key for key in bounds if key not in figures):
        table.add_row(key, "not measured", str(bounds[key]), "")
    Console(width=120).print(table)
