"""Looks at a champion beside its predecessor: the scores of both on the same items, made with the same."""

from typing import NamedTuple

import duckdb

# By what both scores were made with: each item's newest ones, when the first came, and the oldest's time.
LOOKS = """
    WITH newest AS (
        SELECT digest, suite_version, coalesce(config_hash, '') AS engine, coalesce(code_version, '') AS code,
            item, arg_max(score, "at") AS score, min("at") AS began, max("at") AS "at"
        FROM scores WHERE base = $base AND suite = $suite AND score IS NOT NULL
            AND (digest = $champion OR digest IS NOT DISTINCT FROM $predecessor)
            AND (digest IS NULL OR policy = $policy)
        GROUP BY ALL
    )
    SELECT suite_version, engine, code, list(mine.score ORDER BY item), list(theirs.score ORDER BY item),
        min(greatest(mine.began, theirs.began)) AS began, min(least(mine."at", theirs."at"))
    FROM newest mine JOIN newest theirs USING (suite_version, engine, code, item)
    WHERE mine.digest = $champion AND theirs.digest IS NOT DISTINCT FROM $predecessor
    GROUP BY suite_version, engine, code ORDER BY began
"""


class Made(NamedTuple):
    """What scores were made with.

    The suite's version, which has those of the verifier's rule and of the base's tokenizer and template; a
    hash of the engine's settings; and the code.
    """

    suite_version: str
    config_hash: str
    code_version: str


class CommonScores(NamedTuple):
    """The scores in [0, 1] of champion and predecessor on the same items; `at`: the oldest's time."""

    made: Made
    champion: list[float]
    predecessor: list[float]
    at: float


def looks(
    ledger: duckdb.DuckDBPyConnection,
    suite: str,
    base: str,
    policy: str,
    champion: str,
    predecessor: str | None,
) -> list[CommonScores]:
    """Return the looks at a champion on a suite, the first one first; a predecessor of None is the base."""
    named = {"base": base, "policy": policy, "suite": suite, "champion": champion, "predecessor": predecessor}
    return [
        CommonScores(Made(*made), mine, theirs, at)
        for *made, mine, theirs, _, at in ledger.execute(LOOKS, named).fetchall()
    ]
