"""What `graftwork quality` shows, read from the catalog and the ledger's snapshot, without services."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.catalog.opening import open_catalog
from engine.controller.due import drift
from engine.controller.facts import gather
from engine.errors import NotFound
from engine.ledger.ledger import open_ledger
from engine.report.quality import QualityRow, calibrated, quality, shown
from engine.settings.params import Params, known_policies


def quality_of(params: Params, policy: str, segment: str | None, limit: int) -> dict[str, Any]:
    """Return a policy's rows (of one segment, if given), and sentences on drift and calibration.

    Raises `NotFound` for an unknown policy or segment.
    """
    with open_catalog(params.paths) as catalog, open_ledger(params.paths.ledger_snapshot) as ledger:
        rows = quality(ledger, catalog, policy, limit)
        facts = gather(params, policy, catalog) if policy in known_policies(params) else None
        notes = [
            drift(facts) if facts else None,
            None if _is_scored(rows) else _unscored(policy, rows[0].suite),
        ]
        said = calibrated(ledger, policy)
    if segment is not None:
        rows = _of_segment(rows, policy, segment)
    return {"rows": rows, "notes": [note for note in notes if note], "calibration": said}


def _is_scored(rows: Sequence[QualityRow]) -> bool:
    return any(row.score for row in rows if row.digest)


def _unscored(policy: str, suite: str) -> str:
    if not suite:
        return f"The policy {policy!r} has no suite: set `suite` in its settings and score its revisions."
    return (
        f"No revision of {policy!r} has been scored on {suite} yet. `graftwork score {policy}@DIGEST` does."
    )


def _of_segment(rows: Sequence[QualityRow], policy: str, segment: str) -> list[QualityRow]:
    named = sorted({row.segment for row in rows if row.segment})
    if segment not in named:
        there = f"It has {', '.join(named)}." if named else "None of its scored items has one."
        raise NotFound(f"The suite of {policy!r} has no segment {segment!r}. {there}", nearest=named)
    return [row for row in rows if row.segment == segment]


def as_json(found: dict[str, Any]) -> dict[str, Any]:
    """Return what `quality_of` found as values of JSON."""
    return found | {"rows": [asdict(row) for row in found["rows"]]}


def as_table(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the lines of the table."""
    return [shown(row) for row in found["rows"]]
