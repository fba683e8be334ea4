"""What evaluators have said while a release ran: of users' answers, and of a shadow's beside them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import duckdb

from engine.catalog.records import Release
from engine.ledger.queries import ANSWERED, of_canary

# The first score that was taken of an answer by an evaluator's version of this release.
SCORED = f"""
    WITH answers AS (
        SELECT id, key, unit, arm, coalesce(route_version, 0) AS version,
            coalesce(status, 200) >= 400 AS is_refused {ANSWERED}
    ), values AS (
        SELECT 'e' || rowid AS seq, "at", request AS id, evaluator, version AS rule, score AS value,
            NULL AS by_key
        FROM evaluations WHERE release = $release AND score IS NOT NULL
        UNION ALL
        SELECT 'm' || min(rowid), arg_min("at", rowid), request_id, metric, '', arg_min(value, rowid), key
        FROM metrics WHERE request_id IN (SELECT id FROM answers) GROUP BY request_id, metric, key
    )
    SELECT seq, values."at", version, key, unit, arm = 'canary', evaluator, rule, value
    FROM values JOIN answers ON answers.id = values.id AND (by_key IS NULL OR by_key = key)
    WHERE values."at" <= $ended AND NOT is_refused ORDER BY values."at", seq
"""
USES = """
    SELECT evaluator, version, count(score), count(*) FILTER (score IS NULL), arg_max(fault, "at"),
        coalesce(sum(seconds), 0), coalesce(sum(tokens), 0)::BIGINT
    FROM evaluations WHERE release = $release GROUP BY evaluator, version ORDER BY evaluator, version
"""
SHADOW_COST = """
    SELECT count(*), coalesce(sum(latency_s), 0),
        coalesce(sum(coalesce(prompt_tokens, 0) + coalesce(completion_tokens, 0)), 0)::BIGINT
    FROM observations WHERE "at" >= $since - 3600
        AND id IN (SELECT answer FROM shadows WHERE release = $release)
"""
UNITS = "SELECT unit FROM shadows WHERE release = $release"


class LiveScore(NamedTuple):
    """An evaluator's score of an answer, or a metric that its client reported, at `at` (epoch seconds).

    `seq` tells it from all others; `version` is the route's at the answer, `rule` the evaluator's.
    """

    seq: str
    at: float
    version: int
    key: str
    unit: str
    is_canary: bool
    evaluator: str
    rule: str
    value: float


class EvaluatorUse(NamedTuple):
    """What an evaluator did for a release: scores, failures with the newest fault, and what they cost."""

    evaluator: str
    version: str
    scores: int
    failures: int
    fault: str | None
    seconds: float
    tokens: int

    def sentence(self) -> str:
        """Return it in words."""
        cost = f"{self.tokens} tokens" if self.tokens else f"{self.seconds:.1f} s"
        failed = f", {self.failures} failures (the newest: {self.fault})" if self.failures else ""
        return f"{self.evaluator} (version {self.version}): {self.scores} scores{failed}, {cost}."


def live_scores(ledger: duckdb.DuckDBPyConnection, release: Release) -> list[LiveScore]:
    """Return the scores and metrics of a canary's and its baseline's answers, in order of arrival."""
    return list(starmap(LiveScore, ledger.execute(SCORED, of_canary(release) | _named(release)).fetchall()))


def evaluator_uses(ledger: duckdb.DuckDBPyConnection, release: Release) -> list[EvaluatorUse]:
    """Return what each evaluator has done for a release."""
    return list(starmap(EvaluatorUse, ledger.execute(USES, _named(release)).fetchall()))


def shadow_cost(ledger: duckdb.DuckDBPyConnection, release: Release) -> tuple[int, float, int]:
    """Return a shadow's answers, the engine's seconds for them, and their tokens, prompts included."""
    asked = _named(release) | {"since": release.created_at}
    row: tuple[int, float, int] = ledger.execute(SHADOW_COST, asked).fetchall()[0]
    return row


def costs_in_words(uses: Iterable[EvaluatorUse], shadow_cost: Sequence[float]) -> str:
    """Return what a shadow and evaluators have done and cost; `shadow_cost` as `shadow_cost` returns it."""
    answers, seconds, tokens = shadow_cost
    shadow = f"The shadow gave {answers} answers in {seconds:.1f} s, with {tokens} tokens." if answers else ""
    return f"{shadow} {' '.join(use.sentence() for use in uses)}".strip()


def release_progress(
    ledger: duckdb.DuckDBPyConnection, release: Release
) -> tuple[dict[str, float], frozenset[str]]:
    """Return what each evaluator has spent on a release, tokens or else seconds, and the shadow's units."""
    spent: dict[str, float] = defaultdict(float)
    for use in evaluator_uses(ledger, release):
        spent[use.evaluator] += use.tokens or use.seconds
    units = frozenset(unit for (unit,) in ledger.execute(UNITS, _named(release)).fetchall())
    return spent, units


def _named(release: Release) -> dict[str, Any]:
    return {"release": release.id}
