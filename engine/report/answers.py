"""Sample answers of the base and of a revision to the same frozen questions, for the report.

The first items of the suite are shown, whatever their scores: a choice by score would flatter.
"""

import duckdb

from engine.ledger.queries import named_rows
from engine.report.data import AnswerPair, RevisionRow, SampleAnswers

SAMPLES = 6
# `SELECT *`: a snapshot written by an older version has fewer columns.
ANSWERS = """
    SELECT * FROM scores
    WHERE base = $base AND suite = $suite AND digest IS NOT DISTINCT FROM $digest
        AND (digest IS NULL OR policy = $policy) AND suite_version = (
            SELECT arg_max(suite_version, "at") FROM scores WHERE base = $base AND suite = $suite)
    QUALIFY row_number() OVER (PARTITION BY item ORDER BY "at" DESC) = 1
    ORDER BY item LIMIT $most
"""


def sample_answers(ledger: duckdb.DuckDBPyConnection, base: str, row: RevisionRow) -> SampleAnswers | None:
    """Return answers before and after of a scored revision; None when nothing is known of its questions."""
    if row.score is None:
        return None
    named = {"base": base, "policy": row.policy, "suite": row.score.suite, "most": SAMPLES}
    before, after = (
        {one["item"]: one for one in named_rows(ledger.execute(ANSWERS, named | {"digest": digest}))}
        for digest in (None, row.digest)
    )
    pairs = tuple(
        AnswerPair(
            told["question"], *(side[item][name] for side in (before, after) for name in ("answer", "score"))
        )
        for item, told in after.items()
        if item in before and told.get("question")
    )
    return SampleAnswers(row.policy, row.digest, pairs) if pairs else None
