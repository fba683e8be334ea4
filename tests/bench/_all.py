"""Every benchmark, one after another; docs/benchmarks gets each one's figures as it ends.

    python tests/bench/_all.py [NAME ...] [--long] [--params params.yaml]

What was measured at this commit, or at one that differs in docs only, is left out, so a run that was stopped
goes on where it was. At the end each figure that falls short is listed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _figures as figures
import _record as record
from _run import INTERRUPTED

from engine.settings.params import load_params
from flows.cli.admin import run_patiently

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
# The main job on the other bases.
RUNS = ("run --base tiny-moe", "run --base tiny-mla")


def graftwork(words: Sequence[str], params: Path) -> int:
    """Run a command in a process of its own; return how it ended."""
    command = [sys.executable, "-m", "flows.cli", *words, "--params", str(params)]
    print(f"graftwork {' '.join(words)}", flush=True)
    began = time.monotonic()
    ended = run_patiently(command)
    print(f"graftwork {' '.join(words)} took {(time.monotonic() - began) / 60:.1f} minutes.", flush=True)
    return ended


def is_measured(run: dict[str, str] | None, is_long: bool) -> bool:
    """Say whether code as it is now was measured, in this form or the long one."""
    if run is None or (is_long and run["form"] != "long") or run["commit"].endswith("+"):
        return False
    command = ["git", "diff", "--quiet", run["commit"], "--", ".", *record.PROSE]
    is_equal = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return is_equal and not record.commit().endswith("+")


def written_at(file: Path) -> int | None:
    """Return when a file was written, None for none. A file system's clock may be behind `time.time`."""
    return file.stat().st_mtime_ns if file.exists() else None


def measure(known: dict[str, Any], name: str, form: Sequence[str], params: Path) -> list[str]:
    """Run one benchmark and take its figures; return a sentence for each that falls short.

    Raises `KeyboardInterrupt` where it was interrupted.
    """
    words = name.split() if name in RUNS else ["bench", name, *form]
    said, file = f"graftwork {' '.join(words)}", load_params(params).paths.bench / f"{name}.json"
    before = written_at(file)
    code = graftwork(words, params)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if name in RUNS and not code:
        known["runs"][name] = {"commit": record.commit(), "form": "long", "says": "met"}
    if written_at(file) in (None, before):
        short = [f"it ended with {code}, and no figure counts."] if code else []
    else:
        result = json.loads(file.read_text())
        figures.take(known, name, said, result)
        short = result["missed"] + result["undecided"]
    figures.write(known)
    return [f"{said}: {sentence}" for sentence in short]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--long", action="store_true", help="the forms that decide")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(NAMES)):
        parser.error(f"There is no benchmark {', '.join(unknown)}.")
    known, short = figures.load(), list[str]()
    asked = given.names or [*NAMES, *RUNS]
    left = [name for name in asked if not is_measured(known["runs"].get(name), given.long)]
    print(f"{len(asked) - len(left)} of {len(asked)} were measured at this code already.", flush=True)
    for number, name in enumerate(left):
        print(f"{name}: {number + 1} of {len(left)}.", flush=True)
        try:
            short += measure(known, name, ["--long"] * given.long, given.params)
        except KeyboardInterrupt:
            print(f"Ended by Ctrl-C: {number} of {len(left)} were measured. The same command goes on there.")
            sys.exit(INTERRUPTED)
    if short:
        sys.exit("\n".join(["These fall short, or are undecided:", *short]))
    print(f"All {len(left)} kept their bounds.")


if __name__ == "__main__":
    main()
