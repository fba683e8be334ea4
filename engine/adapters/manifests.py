"""A stored revision's manifest and probe as plain values, for readers without torch."""

import json
from pathlib import Path
from typing import Any

from engine.errors import AdapterError

MANIFEST, PROBE = "manifest.json", "probe.json"


def stored_manifest(directory: Path) -> dict[str, Any]:
    """Return a revision directory's manifest, unverified; {} when this machine has none."""
    file = directory / MANIFEST
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def named_base(directory: Path) -> str:
    """Return the other base that an imported adapter names as its own, or an empty string."""
    return str(stored_manifest(directory).get("config", {}).get("import", {}).get("named_base", ""))


def stored_probe(directory: Path) -> dict[str, Any]:
    """Return a revision's effect probe, unverified; {} when it has none, `AdapterError` for a damaged one."""
    file = directory / PROBE
    try:
        probe = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        probe = None
    if not isinstance(probe, dict):
        raise AdapterError(f"The effect probe {file} is damaged. Remove it, or export the revision again.")
    return probe
