"""A purge's record under `purges/`: makes it resumable and documents who purged what.

Of the policy it holds only the name, which may be used again on explicit request.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.base.resident import ensure_base
from engine.errors import Conflict
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


def reuse_purged_name(params: Params, name: str, owner: str, reuse: bool) -> None:
    """Raise `Conflict` for a purged name; with `reuse`, create it as a new policy without revisions.

    Raises `Conflict` even with `reuse` while the purge is unfinished.
    """
    from engine.catalog.catalog import Policy
    from engine.catalog.opening import open_catalog

    if not params.paths.has_catalog:
        return
    with open_catalog(params.paths, migrated=True) as catalog:
        mark = catalog.purges.find(name)
        if mark is None or catalog.policies.owners([name]):
            return
        record = recorded(purges(params) / f"{name}.json")
        if record is not None and record.finished_at is None:
            raise Conflict(
                f"The purge of {name!r} by {mark['by']!r} has not finished. Run `graftwork purge {name}` "
                "again; it continues where it stopped. Then give --reuse-name."
            )
        if not reuse:
            raise Conflict(
                f"The name {name!r} was purged by {mark['by']!r}. Choose another name, or give --reuse-name "
                "to create a new policy under it."
            )
        base = ensure_base(params.base, params.paths).digest
        catalog.policies.add(Policy(name, base, {}, owner, time.time()), again=True)
