"""Code blocks of the pages that tests run: `run` in a scratch directory, `run up` on running services."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.helpers.documents import Block, page
from tests.helpers.repository import ROOT

# What may follow a block's language.
RUN, RUN_UP = ("run",), ("run", "up")
# The default ports, which the pages name.
PORTS = {"engine": 8460, "trainer": 8461, "controller": 8462, "mlflow": 8463, "prefect": 8464}


def wrong_marks(path: Path) -> list[str]:
    """Return the blocks of a page whose marks are unknown, or whose language cannot be run."""
    faults = []
    for block in page(path).blocks:
        is_known = not block.marks or (block.marks in (RUN, RUN_UP) and block.language in ("bash", "python"))
        if not is_known and not block.language.startswith("{"):
            faults.append(f"{path.name}:{block.line} {block.language} {' '.join(block.marks)}")
    return faults


def marked(path: Path, *marks: tuple[str, ...]) -> list[Block]:
    """Return the blocks of a page with one of these marks, in order."""
    return [block for block in page(path).blocks if block.marks in marks]


def script_of(blocks: Iterable[Block]) -> str:
    """Return blocks as one shell script, as a reader would paste them; stderr names each before it runs."""
    parts = ["set -euo pipefail"]
    for block in blocks:
        parts.append(f"echo '--- line {block.line}' >&2")
        is_python = block.language == "python"
        parts.append(f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK" if is_python else block.text)
    return "\n".join(parts)


def scratch(directory: Path, settings: Path, state: Path, suites: Path) -> Path:
    """Make a directory that looks like the checkout, with settings, state and suites of its own.

    Makes a state with the bases that are built already, and a copy of the suites, where there are none.
    Leaves out the Makefile, whose targets set up the environment.
    """
    if not state.exists():
        state.mkdir()
        bases = ROOT / ".graftwork" / "bases"
        bases.mkdir(parents=True, exist_ok=True)
        (state / "bases").symlink_to(bases)
    if not suites.exists():
        shutil.copytree(ROOT / "eval_suites", suites)
    directory.mkdir()
    # A block may edit the settings.
    shutil.copy(settings, directory / "params.yaml")
    own = {".graftwork": state, "eval_suites": suites, ".venv": Path(sys.prefix)}
    left_out = (".", "Makefile", "params", "pyproject", "repro", "site")
    shared = [path for path in ROOT.iterdir() if not path.name.startswith(left_out)]
    for name, target in ({path.name: path for path in shared} | own).items():
        (directory / name).symlink_to(target)
    return directory


def run(blocks: Iterable[Block], directory: Path, ports: Mapping[str, int], timeout_s: float) -> None:
    """Run blocks in one shell in a scratch directory; raise `AssertionError` with the output where one fails.

    A default port in the text stands for that service's port.
    """
    script = script_of(blocks)
    for service, port in ports.items():
        script = re.sub(rf"(?<=:){PORTS[service]}\b", str(port), script)
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=directory, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
