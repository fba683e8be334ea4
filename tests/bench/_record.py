"""What every benchmark shares: repeats, a result file, and a table with each figure's target."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.settings.reproducible import VARIABLE


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


def report(
    name: str,
    figures: Mapping[str, float],
    targets: Mapping[str, str],
    spreads: Mapping[str, str],
    correct: bool,
    directory: Path = Path(".graftwork/bench"),
) -> None:
    """Write `NAME.json` and print each figure; no figure is written while the check is red."""
    if not correct:
        sys.exit(f"bench {name}: the correctness check failed, so no figure counts.")
    directory.mkdir(parents=True, exist_ok=True)
    result = {**figures, "hardware": hardware(), "commit": commit(), "python": platform.python_version()}
    result[VARIABLE] = os.environ.get(VARIABLE, "unset")
    (directory / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    table = Table("figure", "value", "target", "spread", title=f"bench {name}, {hardware()}, {commit()}")
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}", targets.get(key, "reported"), spreads.get(key, ""))
    Console(width=120).print(table)
