"""Queries that several readers share: a revision's latest scores, and a canary's rewards.

They run on the ledger or on its snapshot.
"""

from itertools import starmap
from typing import Any, NamedTuple

import duckdb

from engine.catalog.records import Release

SCORES = """
    SELECT suite_version, item, arg_max(score, "at"), max("at"), suite_version = (
        SELECT arg_max(suite_version, "at") FROM scores WHERE base = $base AND suite = $suite)
    FROM scores
    WHERE base = $base AND suite = $suite AND digest IS NOT DISTINCT FROM $digest
        AND (digest IS NULL OR policy = $policy) AND score IS NOT NULL
    GROUP BY suite_version, item ORDER BY suite_version, item
"""
REWARDS = """
    WITH answers AS (
        SELECT id, key, unit, arm FROM observations
        WHERE policy = $policy AND purpose = 'user' AND unit IS NOT NULL
            AND (route_version >= $version OR ($version IS NULL AND "at" >= $started))
            AND ((arm = 'canary' AND digest = $revision)
                OR (arm IN ('champion', 'base') AND digest IS NOT DISTINCT FROM $baseline))
    ), first AS (
        SELECT request_id, key, arg_min(reward, rowid) AS reward, arg_min("at", rowid) AS rated_at,
            min(rowid) AS seq
        FROM feedback WHERE request_id IN (SELECT id FROM answers) AND reward BETWEEN 0 AND 1 GROUP BY ALL
    )
    SELECT rated_at, unit, arm = 'canary', reward
    FROM answers JOIN first ON request_id = answers.id AND first.key = answers.key
    WHERE rated_at <= $ended ORDER BY seq
"""


class LatestScore(NamedTuple):
    """An item's latest score in [0, 1], at `at` (epoch s); `is_newest`: of the suite's newest version."""

    version: str
    item: str
    score: float
    at: float
    is_newest: bool


def latest_scores(
    ledger: duckdb.DuckDBPyConnection, base: str, policy: str, suite: str, digest: str | None
) -> list[LatestScore]:
    """Return a revision's scores on every version of a suite, by version and item; None is the base."""
    named = {"base": base, "policy": policy, "suite": suite, "digest": digest}
    return list(starmap(LatestScore, ledger.execute(SCORES, named).fetchall()))


def canary_rewards(
    ledger: duckdb.DuckDBPyConnection, release: Release
) -> list[tuple[float, str, bool, float]]:
    """Return a canary's rewards in order of arrival: (rated at, unit, whether of the canary, reward).

    Counts users' requests with a unit, routed since the canary's start; of each its first rating, until the
    release's end. The route's version tells the start, since clocks may jump; only releases that ended
    before versions were recorded have the time alone.
    """
    named: dict[str, Any] = {
        "policy": release.policy,
        "revision": release.revision,
        "baseline": release.baseline,
    }
    named |= {"version": release.canary_version, "started": release.canary_started_at}
    ended = release.updated_at if release.state != "running" else float("inf")
    return ledger.execute(REWARDS, named | {"ended": ended}).fetchall()


def named_rows(found: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Return a result's rows as dicts by column name."""
    names = [column[0] for column in found.description or []]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
