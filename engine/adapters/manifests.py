"""A stored revision's manifest as plain values, for readers that need no tensors and so no torch."""

import json
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def stored_manifest(directory: Path) -> dict[str, Any]:
    """Return what a revision directory says of itself, unproven; {} when this machine has none."""
    file = directory / MANIFEST
    return dict(json.loads(file.read_text())) if file.is_file() else {}
