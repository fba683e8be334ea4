"""Gathers what a report shows from the ledger's snapshot and the catalog.

Knows which rows belong in a report of a run, and replays a canary's evidence as the controller saw it.
Writes nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import duckdb
import numpy as np

from engine.adapters.catalog import Catalog, Release, Revision
from engine.config import ReleaseConfig
from engine.quality.estimate import interval
from engine.quality.ledger import open_snapshot
from engine.quality.report_data import (
    CanaryPoint,
    Curve,
    ReleaseResult,
    ReportData,
    RevisionRow,
    Step,
    SuiteScore,
)
from engine.quality.sequential import CanaryComparison

MAX_POINTS = 200
MAX_REVISIONS = 20

# The rows that the controller judges by (engine.quality.evidence), with the moment they were rated.
RATED = """
    SELECT rated_at, unit, arm = 'canary', reward FROM rated
    WHERE policy = $policy AND "at" >= $started AND rated_at <= $ended
        AND purpose = 'user' AND unit IS NOT NULL AND reward BETWEEN 0 AND 1
        AND ((arm = 'canary' AND digest = $revision)
            OR (arm IN ('champion', 'base') AND digest IS NOT DISTINCT FROM $baseline))
    ORDER BY seq
"""
STEPS = """
    SELECT session, digest, step, reward, importance_ratio, rollout_s, update_s, handoff_s FROM train_steps
    WHERE policy = ? AND "at" >= ? ORDER BY min("at") OVER (PARTITION BY session), session, step
"""
SCORES = """
    SELECT score FROM scores
    WHERE base = $base AND suite = $suite AND digest IS NOT DISTINCT FROM $digest
        AND (digest IS NULL OR policy = $policy) AND suite_version = (
            SELECT arg_max(suite_version, "at") FROM scores WHERE base = $base AND suite = $suite)
    ORDER BY item
"""


def collect(
    ledger_snapshot: Path,
    catalog: Catalog,
    policies: Sequence[str],
    *,
    title: str,
    created_at: float,
    since: float = 0.0,
    stages: Mapping[str, float] | None = None,
    links: Mapping[str, str] | None = None,
) -> ReportData:
    """Gather the training and releases of `policies` from `since` on, and their newest revisions.

    Raises `NotFound` when there is no snapshot yet or a policy is unknown.
    """
    bases = {catalog.policy(name).base for name in policies}
    with open_snapshot(ledger_snapshot) as ledger:
        curves = tuple(curve for name in policies for curve in _curves(ledger, name, since))
        releases = [release for name in policies for release in catalog.releases(name)]
        started = sorted(
            (item for item in releases if item.created_at >= since), key=lambda it: it.created_at
        )
        results = tuple(_result(ledger, catalog, release) for release in started)
    return ReportData(
        title=title,
        created_at=created_at,
        base=", ".join(f"{catalog.base(digest).name} ({digest[:12]})" for digest in sorted(bases)),
        curves=curves,
        releases=results,
        revisions=tuple(row for name in policies for row in _revisions(catalog, name)),
        stages=tuple((stages or {}).items()),
        links=tuple((links or {}).items()),
    )


def _curves(ledger: duckdb.DuckDBPyConnection, policy: str, since: float) -> list[Curve]:
    sessions: dict[str, list[Step]] = {}
    last: dict[str, str | None] = {}
    for session, digest, *values in ledger.execute(STEPS, [policy, since]).fetchall():
        sessions.setdefault(session, []).append(Step(*values))
        last[session] = digest
    return [Curve(policy, last[session], tuple(steps)) for session, steps in sessions.items()]


def _result(ledger: duckdb.DuckDBPyConnection, catalog: Catalog, release: Release) -> ReleaseResult:
    policy = catalog.policy(release.policy)
    suite = policy.config.get("suite", "")
    started = release.canary_started_at
    return ReleaseResult(
        policy=release.policy,
        revision=release.revision,
        baseline=release.baseline,
        state=release.state,
        reason=release.reason,
        margin=ReleaseConfig.model_validate(release.settings).margin,
        base_score=_suite_score(ledger, policy.base, release.policy, suite, None),
        score=_suite_score(ledger, policy.base, release.policy, suite, release.revision),
        skipped={gate: f"{by['by']}: {by['reason']}" for gate, by in release.skip_gates.items()},
        canary_s=release.updated_at - started if started is not None else None,
        timeline=timeline(ledger, release),
    )


def _suite_score(
    ledger: duckdb.DuckDBPyConnection, base: str, policy: str, suite: str, digest: str | None
) -> SuiteScore | None:
    named = {"base": base, "policy": policy, "suite": suite, "digest": digest}
    scores = [row[0] for row in ledger.execute(SCORES, named).fetchall()]
    if not scores:
        return None
    return SuiteScore(policy, digest, suite, len(scores), fmean(scores), *interval(scores))


def timeline(ledger: duckdb.DuckDBPyConnection, release: Release) -> tuple[CanaryPoint, ...]:
    """Return a canary's evidence over time as the controller saw it, at most `MAX_POINTS` points."""
    started = release.canary_started_at
    if started is None:
        return ()
    ended = release.updated_at if release.state != "running" else float("inf")
    named = {"policy": release.policy, "started": started, "ended": ended}
    named |= {"revision": release.revision, "baseline": release.baseline}
    seen: set[str] = set()
    rows, latest = [], started
    for at, unit, is_canary, reward in ledger.execute(RATED, named).fetchall():
        if unit not in seen:
            seen.add(unit)
            # Evidence has the order of arrival, which two gateways' clocks need not keep.
            latest = max(latest, at)
            rows.append((latest - started, is_canary, reward))
    settings = ReleaseConfig.model_validate(release.settings)
    return _points(rows, CanaryComparison(release.weight, settings.alpha, settings.margin))


def _points(rows: list[tuple[float, bool, float]], comparison: CanaryComparison) -> tuple[CanaryPoint, ...]:
    stride = max(1, -(-len(rows) // MAX_POINTS))
    arms: dict[bool, list[float]] = {True: [], False: []}
    points = []
    for number, (seconds, is_canary, reward) in enumerate(rows, start=1):
        arms[is_canary].append(reward)
        if number % stride and number != len(rows):
            continue
        canary, baseline = np.array(arms[True], dtype=float), np.array(arms[False], dtype=float)
        comparison.update(canary, baseline)
        mean, other = (float(arm.mean()) if len(arm) else None for arm in (canary, baseline))
        points.append(
            CanaryPoint(seconds, len(canary), len(baseline), mean, other, comparison.lower, comparison.upper)
        )
    return tuple(points)


def _revisions(catalog: Catalog, policy: str) -> list[RevisionRow]:
    route = catalog.route(policy)
    roles = {route.previous: "previous", route.canary: "canary", route.champion: "champion"}
    roles |= {stone.digest: "buried" for stone in catalog.tombstones() if stone.policy == policy}
    return [
        RevisionRow(
            row.policy,
            row.digest,
            row.parent,
            row.step,
            row.rank,
            row.bytes,
            row.created_at,
            roles.get(row.digest, ""),
        )
        for row in _exported(catalog, policy)
    ]


def _exported(catalog: Catalog, policy: str) -> list[Revision]:
    found: list[Revision] = []
    page = catalog.revisions(policy)
    while page and len(found) < MAX_REVISIONS:
        found += [row for row in page if row.state == "exported"]
        page = catalog.revisions(policy, after=page[-1])
    return found[:MAX_REVISIONS]
