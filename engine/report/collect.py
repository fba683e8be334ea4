"""Collects a report's data from the ledger's snapshot and the catalog.

A canary's evidence is replayed in the order in which the controller saw it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb

from engine.adapters.manifests import named_base, stored_manifest
from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import Evidence, advance
from engine.ledger.canaries import CanaryReader
from engine.ledger.evaluations import EvaluatorUse, costs_in_words, evaluator_uses, shadow_cost
from engine.ledger.ledger import open_snapshot
from engine.ledger.queries import canary_fallbacks, canary_ratings, canary_weights, named_rows, newest_items
from engine.ledger.shadows import ShadowReader
from engine.quality.canary import FeedbackCounts
from engine.quality.guards import GuardResult, RewardGuard
from engine.report.data import (
    HAS_CURVE,
    AnswerPair,
    CanaryPoint,
    Curve,
    Event,
    PolicyRow,
    QualityTable,
    ReleaseResult,
    ReportData,
    RevisionRow,
    SampleAnswers,
)
from engine.report.overview import overview, suite_score
from engine.report.quality import calibrated, quality, shown
from engine.settings.params import DIGEST12
from engine.settings.releases import ReleaseConfig
from engine.training.service.train_step import TrainStep

MAX_POINTS = 200
# Limits of one page, since a catalog may hold a million revisions.
MAX_POLICIES, MAX_REVISIONS, MAX_RELEASES, MAX_LINES, MAX_NOTICES = 50, 20, 30, 12, 20

# `SELECT *`: a snapshot written by an older version has fewer columns.
STEPS = f"""
    WITH lines AS (
        SELECT session, min("at") AS began FROM train_steps
        WHERE policy = $policy AND "at" >= $since AND {HAS_CURVE}
        GROUP BY session ORDER BY began DESC LIMIT $most
    )
    SELECT train_steps.* FROM train_steps JOIN lines USING (session)
    WHERE policy = $policy AND "at" >= $since AND {HAS_CURVE} ORDER BY began, session, step
"""
# The first items of the suite are shown, whatever their scores: a choice by score would flatter.
SAMPLES = 6


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
    revisions_dir: Path | None = None,
    alarms: Sequence[str] = (),
    latest: Mapping[str, Evidence] | None = None,
) -> ReportData:
    """Collect `policies` with their newest revisions, and their training and releases since `since`.

    `since` and `created_at` are epoch seconds. The manifests in `revisions_dir` name the training session of
    each revision. `latest` has the newest evidence of running releases by their ids, which only their
    controller knows. `left_out` counts what the page limits cut. Raises `NotFound` when there is no snapshot
    yet or a policy is unknown.
    """
    with open_snapshot(ledger_snapshot) as ledger:
        seen = overview(ledger, catalog, policies, MAX_REVISIONS)
        made = _made(seen.revisions, revisions_dir)
        curves = [curve for name in policies for curve in _curves(ledger, name, since, made)]
        releases = [
            item for name in policies for item in catalog.releases.all(name) if item.created_at >= since
        ]
        tables = [_quality(ledger, catalog, name) for name in policies]
        answers = [_answers(ledger, policy, seen.revisions) for policy in seen.policies]
        releases.sort(key=lambda item: item.created_at)
        results = tuple(
            replace(
                _result(ledger, catalog, release),
                waits=advance(release, latest[release.id]).waits if latest and release.id in latest else (),
            )
            for release in releases[-MAX_RELEASES:]
        )
    names = catalog.bases.names()
    bases = sorted({policy.base for policy in seen.policies})
    counted = {
        "policies": catalog.policies.count() - len(policies),
        "revisions": sum(policy.revisions for policy in seen.policies) - len(seen.revisions),
        "releases": len(releases) - len(results),
    }
    return ReportData(
        title=title,
        created_at=created_at,
        base=", ".join(f"{names.get(digest, 'unknown')} ({digest[:DIGEST12]})" for digest in bases),
        policies=seen.policies,
        curves=tuple(curves),
        releases=results,
        revisions=tuple(with_claim(row, revisions_dir) for row in seen.revisions),
        answers=tuple(filter(None, answers)),
        quality=tuple(filter(None, tables)),
        notices=tuple(
            Event(it.at, it.name.removeprefix("graftwork."), it.policy, it.revision, it.reason)
            for it in catalog.notices.page(MAX_NOTICES)
            if it.at >= since
        ),
        tombstones=_tombstones(catalog, policies),
        stages=tuple((stages or {}).items()),
        links=tuple((links or {}).items()),
        alarms=tuple(alarms),
        left_out=tuple(f"{count} of the {what}" for what, count in counted.items() if count > 0),
    )


def _quality(ledger: duckdb.DuckDBPyConnection, catalog: Catalog, policy: str) -> QualityTable | None:
    """Return a policy's table of quality, with segments of what is in its route; None without a score."""
    rows = [row for row in quality(ledger, catalog, policy, MAX_REVISIONS) if row.role or row.segment is None]
    if not any(row.score for row in rows):
        return None
    return QualityTable(policy, tuple(map(shown, rows)), calibrated(ledger, policy))


def _tombstones(catalog: Catalog, policies: Sequence[str]) -> tuple[Event, ...]:
    stones = [stone for stone in catalog.tombstones.in_force() if stone.policy in policies][-MAX_REVISIONS:]
    return tuple(Event(it.at, "buried", it.policy, it.digest, it.reason, it.by) for it in reversed(stones))


def _answers(
    ledger: duckdb.DuckDBPyConnection, policy: PolicyRow, revisions: Sequence[RevisionRow]
) -> SampleAnswers | None:
    """Return sample answers of a policy's newest scored revision."""
    scored = (row for row in revisions if row.policy == policy.name and row.score)
    newest = next(scored, None)
    return sample_answers(ledger, policy.base, newest) if newest else None


def sample_answers(ledger: duckdb.DuckDBPyConnection, base: str, row: RevisionRow) -> SampleAnswers | None:
    """Return answers before and after of a scored revision; None when nothing is known of its questions."""
    if row.score is None:
        return None
    before, after = (
        newest_items(ledger, base, row.policy, row.score.suite, digest) for digest in (None, row.digest)
    )
    pairs = tuple(
        AnswerPair(
            answer["question"],
            *(side[item][name] for side in (before, after) for name in ("answer", "score")),
        )
        for item, answer in islice(after.items(), SAMPLES)
        if item in before and answer.get("question")
    )
    return SampleAnswers(row.policy, row.digest, pairs) if pairs else None


def _made(revisions: Sequence[RevisionRow], directory: Path | None) -> dict[str, str]:
    """Return the newest exported digest of each training session, from the manifests."""
    made: dict[str, str] = {}
    for row in reversed(revisions) if directory else ():
        assert directory is not None
        manifest = stored_manifest(directory / row.policy / row.digest[:DIGEST12])
        session = manifest.get("config", {}).get("session")
        made |= {session: row.digest} if session else {}
    return made


def with_claim(row: RevisionRow, directory: Path | None) -> RevisionRow:
    """Add the other base that an imported adapter names, from its manifest."""
    if directory is None:
        return row
    return replace(row, named_base=named_base(directory / row.policy / row.digest[:DIGEST12]))


def _curves(
    ledger: duckdb.DuckDBPyConnection, policy: str, since: float, made: Mapping[str, str]
) -> list[Curve]:
    """Return a policy's newest training sessions, oldest first."""
    result = ledger.execute(STEPS, {"policy": policy, "since": since, "most": MAX_LINES})
    lines: dict[str, list[TrainStep]] = {}
    for row in named_rows(result):
        lines.setdefault(row["session"], []).append(TrainStep.of(row))
    return [Curve(policy, made.get(session), tuple(steps), session) for session, steps in lines.items()]


def _result(ledger: duckdb.DuckDBPyConnection, catalog: Catalog, release: Release) -> ReleaseResult:
    policy = catalog.policies.get(release.policy)
    suite = policy.config.get("suite", "")
    started = release.canary_started_at
    guards, observed, feedback = _judged(ledger, release)
    return ReleaseResult(
        policy=release.policy,
        revision=release.revision,
        baseline=release.baseline,
        state=release.state,
        reason=release.reason,
        margin=ReleaseConfig.stored(release.settings).margin,
        base_score=suite_score(ledger, policy.base, release.policy, suite, None),
        score=suite_score(ledger, policy.base, release.policy, suite, release.revision),
        skipped=tuple((gate, f"{by['by']}: {by['reason']}") for gate, by in release.skip_gates.items()),
        canary_s=release.updated_at - started if started is not None else None,
        timeline=timeline(ledger, release),
        id=release.id,
        created_at=release.created_at,
        weights=tuple((max(0.0, at - started), weight) for at, weight in canary_weights(ledger, release))
        if started is not None
        else (),
        guards=guards,
        observed=observed,
        feedback=feedback,
        fallbacks=canary_fallbacks(ledger, release),
        by=release.approval or "",
    )


def _judged(
    ledger: duckdb.DuckDBPyConnection, release: Release
) -> tuple[tuple[GuardResult, ...], tuple[GuardResult, ...], str]:
    """Return what the guards of shadow and canary said at the verdict, or say now.

    First those that decide, then those that are only observed, then counts of feedback and costs.
    """
    evidence = release.evidence if release.state != "running" else _evidence_now(ledger, release)
    shadow = _guards(evidence.get("shadow", {}).get("guards", ()), "shadow: ")
    uses = [EvaluatorUse(**row) for row in evidence.get("evaluators", ())]
    said = costs_in_words(uses, evidence.get("shadow_cost", (0, 0.0, 0)))
    if release.canary_started_at is None:
        return shadow, (), said
    canary = evidence.get("canary", {})
    feedback = FeedbackCounts(**canary["feedback"]).sentence() if canary.get("feedback") else ""
    guards = (*shadow, *_guards(canary.get("guards", ())))
    return guards, _guards(canary.get("observed", ())), f"{feedback} {said}".strip()


def _evidence_now(ledger: duckdb.DuckDBPyConnection, release: Release) -> dict[str, Any]:
    """Return of a running release what its row will have of guards and evaluators."""
    evidence: dict[str, Any] = {}
    if release.settings.get("evaluators"):
        evidence["evaluators"] = [use._asdict() for use in evaluator_uses(ledger, release)]
        evidence["shadow_cost"] = shadow_cost(ledger, release)
        if ReleaseConfig.stored(release.settings).shadow_evaluators:
            evidence["shadow"] = ShadowReader(release).read(ledger, release).summary()
    if release.canary_started_at is not None:
        evidence["canary"] = CanaryReader(release).read(ledger, release).summary()
    return evidence


def _guards(rows: Iterable[dict[str, Any]], prefix: str = "") -> tuple[GuardResult, ...]:
    """Return guards as a release's row has them: a bound that is not known is None there."""
    unknown = {"upper": math.inf}
    found = (GuardResult(**(row if row["upper"] is not None else row | unknown)) for row in rows)
    return tuple(replace(guard, guard=f"{prefix}{guard.guard}") for guard in found)


def timeline(ledger: duckdb.DuckDBPyConnection, release: Release) -> tuple[CanaryPoint, ...]:
    """Return a canary's evidence over time as the controller saw it, in at most `MAX_POINTS` points."""
    started = release.canary_started_at
    if started is None:
        return ()
    reader = CanaryReader(release)
    ratings, latest, points = canary_ratings(ledger, release), started, []
    stride = max(1, -(-len(ratings) // MAX_POINTS))
    for number, rating in enumerate(ratings, start=1):
        reader.rate(rating)
        # Evidence is in order of arrival; the clocks of two gateways may disagree with it.
        latest = max(latest, rating.at)
        if number % stride == 0 or number == len(ratings):
            points.append(_point(latest - started, reader.judge.rewards))
    return tuple(points)


def _point(seconds: float, rewards: RewardGuard) -> CanaryPoint:
    counts, comparison = rewards.counts, rewards.comparison
    means = rewards.mean(True), rewards.mean(False)
    return CanaryPoint(
        seconds, counts[True], counts[False], *means, lower=comparison.lower, upper=comparison.upper
    )
