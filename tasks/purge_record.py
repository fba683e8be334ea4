"""A purge's record under `purges/`: makes it resumable and documents who purged what.

Of the policy it holds only the name.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.files import write_whole
from engine.settings.params import Params

Counts = dict[str, int]


@dataclass
class Record:
    """The progress of a purge: counts by place. `segments` held the policy's bytes.

    `elsewhere` are addresses of its MLflow artifacts that are outside our directory and stay.
    """

    policy: str
    by: str
    reason: str
    at: float
    segments: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    places: dict[str, Counts] = field(default_factory=dict)
    finished_at: float | None = None

    def write(self, file: Path) -> None:
        """Replace the record's file atomically and durably."""
        write_whole(file, json.dumps(asdict(self), indent=2), durable=True)


def purges(params: Params) -> Path:
    """Return the directory of purge records."""
    return params.paths.root / "purges"


def recorded(file: Path) -> Record | None:
    """Return the record in a file; None if there is no file."""
    return Record(**json.loads(file.read_text())) if file.is_file() else None


def is_under_way(params: Params, policy: str) -> bool:
    """Return whether a purge of this name has started and not finished, running or interrupted."""
    record = recorded(purges(params) / f"{policy}.json")
    return record is not None and record.finished_at is None
