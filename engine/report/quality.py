"""What is known of each revision's quality, in one row for it and for each segment of its suite.

A difference is of the same items, suite version, base and settings of the engine; others are never mixed.
Estimates that the ledger keeps come first; where there is none, the scores are a sample of the task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import duckdb

from engine.catalog.catalog import Catalog
from engine.ledger.estimates import Estimate, calibration, has_estimates, newest_estimates
from engine.ledger.queries import named_rows
from engine.quality.estimate import interval, paired_difference
from engine.report.overview import role_of
from engine.settings.params import DIGEST12

# `SELECT *`: a snapshot written by an older version has no segments.
SCORES = """
    SELECT * FROM scores WHERE base = $base AND suite = $suite AND isfinite(score)
        AND (digest IS NULL OR (policy = $policy AND list_contains($digests, digest)))
    QUALIFY row_number() OVER (
        PARTITION BY digest, suite_version, config_hash, item ORDER BY "at" DESC
    ) = 1 ORDER BY item
"""
# Each of these has a row for each revision, and one for each segment that requests name.
ANSWERED = """
    SELECT * FROM observations WHERE policy = $policy AND purpose = 'user' AND coalesce(status, 200) < 400
        AND (digest IS NULL OR list_contains($digests, digest))
"""
GROUPS = (
    "GROUP BY GROUPING SETS ((digest), (digest, segment)) HAVING grouping(segment) = 1 OR segment IS NOT NULL"
)
RATINGS = f"""
    WITH answers AS ({ANSWERED}), said AS (
        SELECT request_id, key, arg_min(reward, rowid) AS reward FROM feedback
        WHERE reward BETWEEN 0 AND 1 AND request_id IN (SELECT id FROM answers) GROUP BY ALL
    )
    SELECT digest, segment, median(latency_s), avg(reward), count(DISTINCT unit) FILTER (reward IS NOT NULL)
    FROM answers LEFT JOIN said ON request_id = id AND said.key = answers.key {GROUPS}
"""
EVALUATED = f"""
    WITH judged AS (
        SELECT evaluations.digest, evaluator, score, segment
        FROM evaluations LEFT JOIN (SELECT id, segment FROM observations WHERE policy = $policy) asked
            ON asked.id = request
        WHERE policy = $policy AND isfinite(score)
    )
    SELECT digest, segment, map_from_entries(list((evaluator, mean))) FROM (
        SELECT digest, segment, evaluator, avg(score) AS mean FROM judged
        {GROUPS.replace("digest", "evaluator, digest")}
    ) GROUP BY digest, segment
"""
COSTS = "SELECT digest, tokens, seconds FROM revisions WHERE policy = $policy"
Key = tuple[str | None, str | None]  # digest, segment
# Suite version and settings of the engine: scores of others are not compared.
Made = tuple[str, str | None]


@dataclass(frozen=True)
class QualityRow:
    """A revision's quality on all items, or on those of a segment; a `digest` of None is the base.

    `difference` is to the revision `against` (`base` is the base itself): the parent, else the champion, else
    the base. `reward` is the mean of the ratings of `units` users, `evaluators` has the mean of each,
    `latency_s` is the median of users' answers. `tokens` and `seconds` are the training's.
    """

    digest: str | None
    role: str
    segment: str | None
    suite: str
    suite_version: str | None = None
    score: Estimate | None = None
    against: str | None = None
    difference: Estimate | None = None
    reward: float | None = None
    units: int = 0
    evaluators: Mapping[str, float] = field(default_factory=dict)
    latency_s: float | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class _KnownQuality:
    """What the ledger says of a policy's revisions and the base on one suite."""

    policy: str
    base: str
    suite: str
    estimates: Sequence[Estimate]
    items: Mapping[str | None, Mapping[Made, Sequence[Mapping[str, Any]]]]

    def newest(self, digest: str | None) -> Made | None:
        """Return with what a revision was scored last."""
        times = [
            (one.at or 0.0, (one.suite_version, one.config_hash))
            for one in self.estimates
            if one.digest == digest
        ]
        times += [(max(row["at"] for row in rows), made) for made, rows in self.items.get(digest, {}).items()]
        return max(times, key=lambda one: one[0])[1] if times else None

    def segments(self, digest: str | None, made: Made) -> list[str]:
        """Return the segments that a revision's scores have."""
        named = {row.get("segment") for row in self.items.get(digest, {}).get(made, ())}
        named |= {one.segment for one in self.estimates if one.digest == digest and _made(one) == made}
        return sorted(filter(None, named))

    def mean(self, digest: str | None, made: Made, segment: str | None) -> Estimate | None:
        """Return a revision's mean, that of the task where both targets are known."""
        stored = self._stored(digest, made, segment, None)
        scores = list(self._scores(digest, made, segment).values())
        # What came from an earlier version's ledger has an approximate interval.
        if (stored and stored.available) or not scores:
            return stored
        return self._estimate(digest, made, segment, (fmean(scores), *interval(scores)), len(scores))

    def difference(
        self, digest: str | None, made: Made, segment: str | None, against: str
    ) -> Estimate | None:
        """Return a revision's difference to another one on the items that both have."""
        if stored := self._stored(digest, made, segment, against):
            return stored
        mine = self._scores(digest, made, segment)
        theirs = self._scores(None if against == "base" else against, made, segment)
        common = [item for item in mine if item in theirs]
        if not common:
            return None
        found = paired_difference([mine[item] for item in common], [theirs[item] for item in common])
        return self._estimate(digest, made, segment, found, len(common), against)

    def compared(
        self, digest: str | None, made: Made, segment: str | None, others: Sequence[str]
    ) -> dict[str, Any]:
        """Return a row's fields of scores, and the difference to the first of others that it has."""
        fields = {"suite_version": made[0], "score": self.mean(digest, made, segment)}
        found = ((other, self.difference(digest, made, segment, other)) for other in others)
        against, difference = next((one for one in found if one[1]), (None, None))
        return fields | {"against": against, "difference": difference}

    def _stored(
        self, digest: str | None, made: Made, segment: str | None, against: str | None
    ) -> Estimate | None:
        wanted = (digest, made, segment, against)
        found = [it for it in self.estimates if (it.digest, _made(it), it.segment, it.against) == wanted]
        return max(found, key=lambda one: one.target == "task", default=None)

    def _scores(self, digest: str | None, made: Made, segment: str | None) -> dict[str, float]:
        rows = self.items.get(digest, {}).get(made, ())
        return {row["item"]: row["score"] for row in rows if segment in (None, row.get("segment"))}

    def _estimate(
        self,
        digest: str | None,
        made: Made,
        segment: str | None,
        found: tuple[float, float, float],
        items: int,
        against: str | None = None,
    ) -> Estimate:
        return Estimate(
            self.policy if digest else None, digest, self.base, self.suite, made[0], "task", *found, items,
            segment=segment, against=against, config_hash=made[1],
        )  # fmt: skip


def _made(estimate: Estimate) -> Made:
    return estimate.suite_version, estimate.config_hash


def quality(
    ledger: duckdb.DuckDBPyConnection, catalog: Catalog, policy: str, limit: int, digest: str | None = None
) -> list[QualityRow]:
    """Return the rows of a policy's newest revisions, or of one alone, and of the base, the newest first.

    A revision's first row is of all items, then one for each segment follows. Raises `NotFound` for an
    unknown policy or revision.
    """
    entry, route = catalog.policies.get(policy), catalog.routes.get(policy)
    found = [catalog.revisions.get(policy, digest)] if digest else catalog.listing.exported(policy, limit)
    parents = {row.digest: row.parent for row in found}
    named = {
        "policy": policy, "suite": str(entry.config.get("suite", "")), "base": entry.base,
        "digests": sorted({*parents, *filter(None, parents.values()), *filter(None, [route.champion])}),
    }  # fmt: skip
    known = _known(ledger, named)
    figures = _figures(ledger, named)
    rows = []
    for one in (*parents, None):
        made = known.newest(one)
        role = "base" if one is None else role_of(route, one)
        others = [
            it for it in (parents.get(one or ""), route.champion, "base") if one and it not in (None, one)
        ]
        for segment in (None, *(known.segments(one, made) if made else ())):
            scored = known.compared(one, made, segment, others) if made else {}
            said = figures.get((one, segment), {})
            rows.append(QualityRow(one, role, segment, known.suite, **scored, **said))
    return rows


def _known(ledger: duckdb.DuckDBPyConnection, named: Mapping[str, Any]) -> _KnownQuality:
    items: dict[str | None, dict[Made, list[dict[str, Any]]]] = {}
    for row in named_rows(ledger.execute(SCORES, named)):
        made = (row["suite_version"], row["config_hash"])
        items.setdefault(row["digest"], {}).setdefault(made, []).append(row)
    policy, base, suite = named["policy"], named["base"], named["suite"]
    return _KnownQuality(policy, base, suite, newest_estimates(ledger, base, policy, suite), items)


def _figures(ledger: duckdb.DuckDBPyConnection, named: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Return what users, evaluators and the training say, by revision and segment."""
    figures: dict[Key, dict[str, Any]] = {}
    asked = {name: named[name] for name in ("policy", "digests")}
    for digest, segment, latency, reward, units in ledger.execute(RATINGS, asked).fetchall():
        figures[digest, segment] = {"latency_s": latency, "reward": reward, "units": units}
    of_policy = {"policy": named["policy"]}
    for digest, segment, means in ledger.execute(EVALUATED, of_policy).fetchall():
        figures.setdefault((digest, segment), {})["evaluators"] = means
    costs = ledger.execute(COSTS, of_policy).fetchall() if has_estimates(ledger) else ()
    for digest, tokens, seconds in costs:
        figures.setdefault((digest, None), {}).update(tokens=tokens, seconds=seconds)
    return figures


def calibrated(ledger: duckdb.DuckDBPyConnection, policy: str) -> str:
    """Return in a sentence how often a policy's past intervals held what a full reading showed later."""
    intervals, held = calibration(ledger, policy)
    if not intervals:
        return "None of its intervals has been checked by a later full reading of the suite yet."
    return (
        f"Of {intervals} intervals from a part of the suite's items, {held} ({held / intervals:.1%}) hold "
        "the value that all items gave later."
    )


def shown(row: QualityRow) -> dict[str, str]:
    """Return a row's line of a table."""
    score, other = row.score, (row.against or "")[:DIGEST12]
    return {
        "revision": f"{(row.digest or '')[:DIGEST12]} {row.role}".strip(),
        "segment": row.segment or "all",
        "score": f"{score.mean:.1%} [{100 * score.low:.1f}, {100 * score.high:.1f}]" if score else "–",
        "of the": score.target if score else "",
        "items": f"{score.items}{f' of {score.available}' if score.available else ''}" if score else "",
        "better by": "".join(
            f"{it.mean:+.1%} [{100 * it.low:+.1f}, {100 * it.high:+.1f}] than {other}"
            for it in filter(None, [row.difference])
        ),
        "users": f"{row.reward:.1%} of {row.units}" if row.reward is not None else "",
        "evaluators": ", ".join(f"{name} {mean:.2f}" for name, mean in sorted(row.evaluators.items())),
        "p50": f"{row.latency_s:.2f} s" if row.latency_s is not None else "",
        "cost": f"{row.tokens:,} tokens, {row.seconds or 0:.0f} s" if row.tokens is not None else "",
    }
