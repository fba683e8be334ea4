"""What a purge notes of itself under `purges/`, so that it goes on after a kill and says who did it.

Knows files, not places. A record holds nothing of the policy but its name.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.files import write_whole
from engine.settings.params import Params

Counts = dict[str, int]


@dataclass
class Record:
    """What a purge has done: counts by place. `segments` held the policy's bytes.

    `elsewhere` are addresses of its artifacts that MLflow noted and that are not ours to remove.
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
        """Put the record in place of the last one; a kill leaves one of the two."""
        write_whole(file, json.dumps(asdict(self), indent=2), durable=True)


def purges(params: Params) -> Path:
    return params.paths.root / "purges"


def recorded(file: Path) -> Record | None:
    """Return the record in a file; None without one."""
    return Record(**json.loads(file.read_text())) if file.is_file() else None


def is_under_way(params: Params, policy: str) -> bool:
    """Say whether a purge of this name has begun and not ended, killed or not."""
    record = recorded(purges(params) / f"{policy}.json")
    return record is not None and record.finished_at is None
