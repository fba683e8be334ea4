"""Which code this is: the release, and the commit when it runs from a git checkout."""

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What to do with state that is older than the oldest which this version reads.
UPGRADE_FIRST = (
    "Upgrade through commit 265b009: start its services once on this state, then those of this version. "
    "Nothing was changed."
)
DESCRIBE = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


@cache
def code_version() -> str:
    """Return the version, such as `0.1.0+g13ad72a0c1b2`, with `.dirty` when files differ from the commit.

    Without a checkout, or without git, it is the version alone.
    """
    commit = _commit()
    return version("graftwork") + (f"+g{commit.replace('-', '.')}" if commit else "")


def _commit() -> str:
    # An installed package may lie inside somebody else's checkout, whose commit says nothing of it.
    if not (ROOT / ".git").exists():
        return ""
    try:
        described = subprocess.run(DESCRIBE, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()
