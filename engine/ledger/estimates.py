"""Estimates of quality, as the ledger keeps them: their record, its event, and the newest of each."""

import uuid
from dataclasses import asdict, dataclass, fields
from typing import Literal

import duckdb

from engine.ledger.ledger import table_columns
from engine.ledger.queries import named_rows
from engine.ledger.spool import Spool
from engine.version import code_version

NAMES = uuid.UUID("3c0b6b0e-6b0f-5c38-9d55-0c6f8f6f2a11")
# What a difference is `against` where that is the base itself.
BASE = "base"
# What an estimate has cost and when it was made say nothing of its content.
NOT_OF_CONTENT = ("at", "seconds")
# The newest of each series, of readings of all items before those of a part: all columns from `policy` to
# `against` are equal in one.
NEWEST = """
    SELECT * FROM estimates WHERE suite = $suite AND base = $base AND (policy = $policy OR digest IS NULL)
    QUALIFY row_number() OVER (
        PARTITION BY digest, suite_version, config_hash, segment, target, against
        ORDER BY items IS NOT DISTINCT FROM available DESC, "at" DESC
    ) = 1
"""
CALIBRATION = """
    SELECT coalesce(sum(intervals), 0)::BIGINT, coalesce(sum(held), 0)::BIGINT FROM calibration
    WHERE policy = $policy
"""


@dataclass(frozen=True)
class Estimate:
    """A row of `estimates`: a revision's mean score in [0, 1], or its difference to `against` in [-1, 1].

    `target` is `suite` or `task`, `against` a digest or `base`, None for a mean; `segment` is None for all
    items. A `digest` of None is the base, which names no policy. `config_hash` is of the engine's settings,
    `seconds` are what reading the `items` of `available` took.
    """

    policy: str | None
    digest: str | None
    base: str
    suite: str
    suite_version: str
    target: Literal["suite", "task"]
    mean: float
    low: float
    high: float
    items: int
    available: int | None = None
    segment: str | None = None
    against: str | None = None
    level: float = 0.95
    seconds: float | None = None
    config_hash: str | None = None
    at: float | None = None


def emit_estimate(spool: Spool, estimate: Estimate, run: str = "") -> str:
    """Hand an estimate to the ledger and return its id, which derives from its content and from `run`.

    That names the scoring that it came from: the same figures by a later one are a newer estimate. Raises
    `ConfigError` where a figure is not finite.
    """
    row = {name: value for name, value in asdict(estimate).items() if value is not None}
    content = {name: value for name, value in row.items() if name not in NOT_OF_CONTENT}
    name = uuid.uuid5(NAMES, run + repr(sorted(content.items())))
    return spool.emit("estimates", id=str(name), code_version=code_version(), **row)


def newest_estimates(ledger: duckdb.DuckDBPyConnection, base: str, policy: str, suite: str) -> list[Estimate]:
    """Return the newest estimates of a policy's revisions and of the base on all versions of a suite.

    A snapshot that an older version wrote has none.
    """
    if not has_estimates(ledger):
        return []
    known = {field.name for field in fields(Estimate)}
    rows = named_rows(ledger.execute(NEWEST, {"base": base, "policy": policy, "suite": suite}))
    return [Estimate(**{name: value for name, value in row.items() if name in known}) for row in rows]


def calibration(ledger: duckdb.DuckDBPyConnection, policy: str) -> tuple[int, int]:
    """Return how many of a policy's past intervals were checked by a full reading, and how many held."""
    if not has_estimates(ledger):
        return 0, 0
    intervals, held = ledger.execute(CALIBRATION, {"policy": policy}).fetchall()[0]
    return intervals, held


def has_estimates(ledger: duckdb.DuckDBPyConnection) -> bool:
    """Return whether a ledger or snapshot is of a version that keeps estimates."""
    return "revisions" in table_columns(ledger)
