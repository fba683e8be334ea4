"""The last version with the catalog's previous schema: its tree, and what makes Python run it.

Its dependencies are this version's, which is what an upgrade of one engine at a time meets as well.
"""

import os
import subprocess
import tomllib
from pathlib import Path

from tests.helpers.repository import ROOT

RECORDS = "engine/catalog/records.py"


def older_commit() -> str:
    """Return the commit before the catalog's schema changed last; `RuntimeError` without the history."""
    changed = _git("log", "-1", "--format=%H", "-G^SCHEMA_VERSION", "--", RECORDS).strip()
    older = _git("rev-parse", "--verify", "--quiet", f"{changed}^").strip() if changed else ""
    if not older:
        raise RuntimeError(
            "The older version comes from Git's history, and this is no clone with all of it. Make one, or "
            "name scenarios without `upgrade` with --only."
        )
    return older


def older_version(folder: Path) -> Path:
    """Put the older version's tree into a new directory and return it."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", older_commit()], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    # vLLM finds its plug-ins by the metadata of an installation.
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def variables(tree: Path) -> dict[str, str]:
    """Return the variables with which Python looks into a tree first, and not where it is started."""
    beside = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [str(tree), *(part for part in beside if Path(part).resolve() != ROOT)]
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""
