"""Queries that several readers share: a revision's latest scores, a canary's ratings and steps.

They run on the ledger or on its snapshot.
"""

from itertools import starmap
from typing import Any, NamedTuple

import duckdb

from engine.catalog.records import Release

SCORES = """
    SELECT suite_version, item, arg_max(score, "at"), max("at") FROM scores
    WHERE base = $base AND suite = $suite AND digest IS NOT DISTINCT FROM $digest
        AND (digest IS NULL OR policy = $policy) AND score IS NOT NULL
    GROUP BY suite_version, item ORDER BY suite_version, item
"""
# `SELECT *`: a snapshot written by an older version has fewer columns.
NEWEST_ITEMS = """
    SELECT * FROM scores
    WHERE base = $base AND suite = $suite AND digest IS NOT DISTINCT FROM $digest
        AND (digest IS NULL OR policy = $policy) AND score IS NOT NULL AND suite_version = (
            SELECT arg_max(suite_version, "at") FROM scores WHERE base = $base AND suite = $suite)
    QUALIFY row_number() OVER (PARTITION BY item ORDER BY "at" DESC) = 1 ORDER BY item
"""
# Of each revision, and of the base, every known outcome on a version of a suite; the newest revisions first.
OUTCOMES = """
    WITH known AS (
        SELECT digest, item, score, "at" FROM scores
        WHERE base = $base AND suite = $suite AND suite_version = $version
            AND (digest IS NULL OR policy = $policy) AND score IS NOT NULL AND "at" < $before
        UNION ALL
        SELECT digest, item, score, "at" FROM readings
        WHERE base = $base AND suite = $suite AND suite_version = $version AND policy = $policy
            AND "at" < $before
    )
    SELECT digest, map_from_entries(list((item, score))) FROM (
        SELECT digest, item, arg_max(score, "at") AS score, max("at") AS "at" FROM known GROUP BY digest, item
    ) GROUP BY digest ORDER BY max("at") DESC LIMIT $most
"""
# Users' requests with a unit, answered by one of the two arms since the canary's start.
ANSWERED = """
    FROM observations
    WHERE policy = $policy AND purpose = 'user' AND unit IS NOT NULL
        AND (route_version >= $version OR ($version IS NULL AND "at" >= $started))
        AND ((arm = 'canary' AND digest = $revision)
            OR (arm IN ('champion', 'base') AND digest IS NOT DISTINCT FROM $baseline))
"""
RATINGS = f"""
    WITH answers AS (
        SELECT id, key, unit, arm, coalesce(route_version, 0) AS version, segment,
            coalesce(status, 200) >= 400 AS is_refused {ANSWERED}
    ),
    first AS (
        SELECT request_id, key, arg_min(reward, rowid) AS reward, arg_min("at", rowid) AS rated_at,
            min(rowid) AS seq
        FROM feedback WHERE request_id IN (SELECT id FROM answers) AND reward BETWEEN 0 AND 1 GROUP BY ALL
    )
    SELECT rated_at, version, first.key, unit, arm = 'canary', reward, seq, segment
    FROM answers JOIN first ON request_id = answers.id AND first.key = answers.key
    WHERE rated_at <= $ended AND NOT is_refused ORDER BY seq
"""
# Users' requests that champion or base answered in the canary's place.
FALLBACKS = """
    SELECT count(*) FROM observations
    WHERE policy = $policy AND purpose = 'user' AND arm = 'fallback' AND route_version >= $version
        AND "at" <= $ended
"""
# When each step of a canary's ramp began, by the version of its route.
STEPS = """
    SELECT version, "at" FROM route_changes
    WHERE policy = $policy AND version IN (SELECT unnest($versions))
"""

# Fewer units, or a shorter time, say nothing about a rate.
TRAFFIC_S, TRAFFIC_LEAST_S, TRAFFIC_UNITS = 300.0, 60.0, 20
# The busiest minute: pauses between bursts of users are no reason to refuse a canary.
TRAFFIC = """
    WITH recent AS (
        SELECT unit, "at" FROM observations
        WHERE policy = $policy AND purpose = 'user' AND unit IS NOT NULL AND "at" >= $since
    ), minutes AS (SELECT count(DISTINCT unit) AS units FROM recent GROUP BY floor("at" / 60))
    SELECT (SELECT max(units) FROM minutes), count(DISTINCT unit), max("at") - min("at") FROM recent
"""


class LatestScore(NamedTuple):
    """An item's latest score in [0, 1] by a version of the suite, at `at` (epoch s)."""

    version: str
    item: str
    score: float
    at: float


def latest_scores(
    ledger: duckdb.DuckDBPyConnection, base: str, policy: str, suite: str, digest: str | None
) -> list[LatestScore]:
    """Return a revision's scores on every version of a suite, by version and item; None is the base."""
    named = {"base": base, "policy": policy, "suite": suite, "digest": digest}
    return list(starmap(LatestScore, ledger.execute(SCORES, named).fetchall()))


def newest_items(
    ledger: duckdb.DuckDBPyConnection, base: str, policy: str, suite: str, digest: str | None
) -> dict[str, dict[str, Any]]:
    """Return a revision's newest rows on the suite's newest version, by item in order; None is the base."""
    named = {"base": base, "policy": policy, "suite": suite, "digest": digest}
    return {row["item"]: row for row in named_rows(ledger.execute(NEWEST_ITEMS, named))}


def known_outcomes(
    ledger: duckdb.DuckDBPyConnection,
    base: str,
    policy: str,
    suite: str,
    version: str,
    before: float,
    most: int = 20,
) -> dict[str | None, dict[str, float]]:
    """Return the outcomes of a policy's newest revisions and of the base (None) on a suite, by item.

    They are all items of a revision, or those that were chosen to be read, `before` a time (epoch seconds).
    """
    named = {
        "base": base, "policy": policy, "suite": suite, "version": version, "before": before, "most": most
    }  # fmt: skip
    return dict(ledger.execute(OUTCOMES, named).fetchall())


class Rating(NamedTuple):
    """The first rating of an answer, `at` epoch seconds; `version` is the route's at the answer."""

    at: float
    version: int
    key: str
    unit: str
    is_canary: bool
    reward: float
    seq: int
    segment: str | None


def canary_ratings(ledger: duckdb.DuckDBPyConnection, release: Release) -> list[Rating]:
    """Return the ratings of a canary's and its baseline's answers in order of arrival.

    Counts users' requests with a unit, routed since the canary's start; of each its first rating, until the
    release's end. The route's version tells the start, since clocks may jump; only releases that ended
    before versions were recorded have the time alone.
    """
    return list(starmap(Rating, ledger.execute(RATINGS, of_canary(release)).fetchall()))


def canary_fallbacks(ledger: duckdb.DuckDBPyConnection, release: Release) -> int:
    """Return how many users' requests were answered in the place of a release's canary."""
    named = {name: value for name, value in of_canary(release).items() if f"${name}" in FALLBACKS}
    count: int = ledger.execute(FALLBACKS, named).fetchall()[0][0]
    return count


def canary_weights(ledger: duckdb.DuckDBPyConnection, release: Release) -> list[tuple[float, float]]:
    """Return the steps of a canary so far: when each began (epoch seconds), and its share of users."""
    if not release.ramp:
        return []
    versions = [int(version) for version, _ in release.ramp]
    began = dict(ledger.execute(STEPS, {"policy": release.policy, "versions": versions}).fetchall())
    return [(began[int(version)], weight) for version, weight in release.ramp if int(version) in began]


def of_canary(release: Release) -> dict[str, Any]:
    """Return the parameters of a query on `ANSWERED`."""
    ended = release.updated_at if release.state != "running" else float("inf")
    return {
        "policy": release.policy,
        "revision": release.revision,
        "baseline": release.baseline,
        "version": release.canary_version,
        "started": release.canary_started_at,
        "ended": ended,
    }


def recent_units_per_s(ledger: duckdb.DuckDBPyConnection, policy: str, now: float) -> float | None:
    """Return how many units a second a policy had in its busiest recent minute; None with too few to tell."""
    busiest, units, span_s = ledger.execute(TRAFFIC, {"policy": policy, "since": now - TRAFFIC_S}).fetchall()[
        0
    ]
    return busiest / 60 if units >= TRAFFIC_UNITS and span_s >= TRAFFIC_LEAST_S else None


def named_rows(result: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Return a result's rows as dicts by column name."""
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
