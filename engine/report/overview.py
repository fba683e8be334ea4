"""Rows of policies and revisions for the report, the controller's page and `graftwork ls`.

Read from the catalog and the ledger's snapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean
from typing import Any

import duckdb

from engine.catalog.catalog import Catalog, Revision, Route
from engine.ledger.queries import newest_items
from engine.quality.estimate import interval
from engine.report.data import PolicyRow, RevisionRow, SuiteScore

USERS = """
    SELECT policy, digest, avg(reward), count(DISTINCT unit) FROM rated
    WHERE policy IN (SELECT unnest(?)) AND purpose = 'user' AND unit IS NOT NULL AND digest IS NOT NULL
    GROUP BY policy, digest
"""
VERDICTS = """
    SELECT policy, digest, arg_max(verdict, "at"), arg_max(reason, "at") FROM verdicts
    WHERE policy IN (SELECT unnest(?)) GROUP BY policy, digest
"""
Key = tuple[str, str]  # policy, digest


@dataclass(frozen=True)
class Overview:
    """Policies and the newest exported revisions of each, newest first."""

    policies: tuple[PolicyRow, ...]
    revisions: tuple[RevisionRow, ...]


@dataclass(frozen=True)
class _RevisionHistory:
    """Users' rewards, verdicts and tombstones of revisions."""

    users: dict[Key, tuple[float, int]]
    verdicts: dict[Key, tuple[str, str]]
    tombstones: dict[Key, str]


def overview(
    ledger: duckdb.DuckDBPyConnection, catalog: Catalog, names: Sequence[str], limit: int
) -> Overview:
    """Return the named policies with at most `limit` revisions each; `NotFound` for an unknown policy."""
    history = _RevisionHistory(
        {(row[0], row[1]): (row[2], int(row[3])) for row in ledger.execute(USERS, [list(names)]).fetchall()},
        {(row[0], row[1]): (row[2], row[3]) for row in ledger.execute(VERDICTS, [list(names)]).fetchall()},
        {(stone.policy, stone.digest): stone.reason for stone in catalog.tombstones.in_force()},
    )
    policies, revisions = [], []
    for name in names:
        rows = [_revision_row(ledger, catalog, history, row) for row in catalog.listing.exported(name, limit)]
        policies.append(_policy_row(ledger, catalog, name, rows[0] if rows else None))
        revisions += rows
    return Overview(tuple(policies), tuple(revisions))


def _policy_row(
    ledger: duckdb.DuckDBPyConnection, catalog: Catalog, name: str, newest: RevisionRow | None
) -> PolicyRow:
    policy, route = catalog.policies.get(name), catalog.routes.get(name)
    running = catalog.releases.all(name, open_only=True)
    config, suite = policy.config, str(policy.config.get("suite", ""))
    base_score, champion_score = (
        suite_score(ledger, policy.base, name, suite, digest) for digest in (None, route.champion)
    )
    return PolicyRow(
        name=name,
        owner=policy.owner,
        base=policy.base,
        task=task_of(config),
        contract=contract_of(config),
        suite=suite,
        champion=route.champion,
        canary=route.canary,
        previous=route.previous,
        weight=route.weight,
        revisions=catalog.listing.count_exported(name),
        newest=newest,
        base_score=base_score,
        champion_score=champion_score,
        running=running[0].step if running else "",
    )


def task_of(config: Mapping[str, Any]) -> str:
    """Return a policy's task: a generated one's name, or its file with the directory, `sums/train.jsonl`."""
    return "/".join(PurePath(str(config.get("task", ""))).parts[-2:])


def contract_of(config: Mapping[str, Any]) -> str:
    """Return what judges a policy's answers: its verifier, or the contract of a generated task."""
    verifier = str(config.get("verifier") or "contract")
    return str(config.get("contract", "")) if verifier == "contract" else verifier


def _revision_row(
    ledger: duckdb.DuckDBPyConnection, catalog: Catalog, history: _RevisionHistory, revision: Revision
) -> RevisionRow:
    policy, digest = key = (revision.policy, revision.digest)
    suite = str(catalog.policies.get(policy).config.get("suite", ""))
    online, units = history.users.get(key, (None, 0))
    verdict, reason = history.verdicts.get(key, ("", ""))
    role = "buried" if key in history.tombstones else role_of(catalog.routes.get(policy), digest)
    return RevisionRow(
        policy=policy,
        digest=digest,
        parent=revision.parent,
        step=revision.step,
        rank=revision.rank,
        bytes=revision.bytes,
        created_at=revision.created_at,
        role=role,
        score=suite_score(ledger, revision.base, policy, suite, digest),
        online=online,
        units=units,
        accepted=revision.probe.get("accepted") if revision.probe else None,
        verdict=verdict,
        reason=reason or history.tombstones.get(key, ""),
    )


def role_of(route: Route, digest: str) -> str:
    """Return a revision's role in its policy's route: champion, canary, previous or an empty string."""
    roles = {route.previous: "previous", route.canary: "canary", route.champion: "champion"}
    return roles.get(digest, "")


def suite_score(
    ledger: duckdb.DuckDBPyConnection, base: str, policy: str, suite: str, digest: str | None
) -> SuiteScore | None:
    """Return mean score and 95% interval on the suite's newest version; a digest of None is the base."""
    return mean_score(suite, newest_items(ledger, base, policy, suite, digest))


def mean_score(suite: str, items: Mapping[str, Mapping[str, Any]]) -> SuiteScore | None:
    """Return the mean score of the ledger's rows of items."""
    scores = [row["score"] for row in items.values()]
    if not scores:
        return None
    measured_at = max(row["at"] for row in items.values())
    return SuiteScore(suite, len(scores), fmean(scores), *interval(scores), measured_at)
