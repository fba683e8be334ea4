"""Every benchmark, one after another, and at the end each figure that falls short.

python tests/bench/_all.py [--params params.yaml]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.process_reaper import die_with_parent
from engine.settings.params import load_params

# The main job on the other bases.
RUNS = (("run", "--base", "tiny-moe"), ("run", "--base", "tiny-mla"))


def graftwork(words: Sequence[str], params: Path) -> int:
    """Run a command in a process of its own; return how it ended."""
    command = [sys.executable, "-m", "flows.cli", *words, "--params", str(params)]
    print(f"graftwork {' '.join(words)}", flush=True)
    began = time.monotonic()
    ended = subprocess.run(command, check=False, preexec_fn=partial(die_with_parent, os.getpid()))
    print(f"graftwork {' '.join(words)} took {(time.monotonic() - began) / 60:.1f} minutes.", flush=True)
    return ended.returncode


def falls_short(words: Sequence[str], params: Path, results: Path) -> list[str]:
    """Run a command; return a sentence for each figure that misses its bound, or on how it failed."""
    file, began = results / f"{words[-1]}.json", time.time()
    code = graftwork(words, params)
    is_new = file.exists() and file.stat().st_mtime >= began
    missed = json.loads(file.read_text())["missed"] if is_new else []
    if code and not missed:
        missed = [f"it ended with {code}, and no figure counts."]
    return [f"graftwork {' '.join(words)}: {sentence}" for sentence in missed]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    params = parser.parse_args().params
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    commands = [*(("bench", name) for name in names), *RUNS]
    results = load_params(params).paths.bench
    short = [sentence for words in commands for sentence in falls_short(words, params, results)]
    if short:
        sys.exit("\n".join(["These fall short:", *short]))
    print(f"All {len(commands)} commands kept their bounds.")


if __name__ == "__main__":
    main()
