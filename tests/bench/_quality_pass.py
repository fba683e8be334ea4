"""Ten revisions scored in one pass, against ten commands one after another: whole commands on one engine."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import _made
from _served import SHAPES, live

from engine.settings.params import Params

BASE, POLICY, SUITE, REVISIONS = "tiny-dense", "scored", "addition-terse", 10
Pair = dict[str, float]
Repeats = Callable[[Callable[[int], Pair]], list[Pair]]


def measured(given: Params, beside: Path, repeats: Repeats) -> list[Pair]:
    """Return what `repeats` takes of pairs: seconds of both forms, and the ratio of the many to the one."""
    shape = SHAPES[BASE]
    with live(given, BASE, beside) as served:
        params = served.params
        file = params.paths.root / "params.json"
        file.write_text(json.dumps(params.model_dump(mode="json")))
        with closing(_made.Maker(params, served.base, POLICY, shape.rank, shape.torch_dtype)) as maker:
            names = maker.make(REVISIONS)
        # Both sides find loaded adapters.
        score(file, names)

        def pair(number: int) -> Pair:
            forms = {"pass_s": [names], "each_s": [[name] for name in names]}
            found, seconds = {}, {}
            for form in sorted(forms, reverse=bool(number % 2)):
                began = time.monotonic()
                found[form] = [row for each in forms[form] for row in score(file, each)]
                seconds[form] = time.monotonic() - began
            if found["pass_s"] != found["each_s"]:
                raise RuntimeError("Scores of one pass are not those of one command after another.")
            return {**seconds, "pass_speedup": seconds["each_s"] / seconds["pass_s"]}

        return repeats(pair)


def score(file: Path, names: Sequence[str]) -> list[object]:
    """Score revisions by the command; return what it prints of them, but for the seconds."""
    asked = ["score", *names, "--suite", SUITE, "--json", "--params", str(file)]
    command = [sys.executable, "-m", "flows.cli", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"graftwork score ended with {done.returncode}: {done.stderr[-2000:]}")
    rows = json.loads(done.stdout)
    return [row | {"seconds": 0.0} for row in (rows if isinstance(rows, list) else [rows])]
