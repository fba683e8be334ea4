"""Looks at a champion beside its predecessor: the scores of both on the same items, made with the same."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import duckdb

# Items that both were scored on with the same suite version, engine and code; of each its newest scores.
PAIRS = """
    WITH newest AS (
        SELECT digest, suite_version, config_hash, code_version, item, arg_max(score, "at") AS score,
            min("at") AS began, max("at") AS "at"
        FROM scores WHERE base = $base AND suite = $suite AND score IS NOT NULL
            AND (digest = $champion OR digest IS NOT DISTINCT FROM $predecessor)
            AND (digest IS NULL OR policy = $policy)
        GROUP BY ALL
    )
    SELECT mine.suite_version, coalesce(mine.config_hash, ''), coalesce(mine.code_version, ''),
        mine.score, theirs.score, greatest(mine.began, theirs.began), least(mine."at", theirs."at")
    FROM newest mine JOIN newest theirs ON theirs.item = mine.item
        AND theirs.suite_version = mine.suite_version
        AND theirs.config_hash IS NOT DISTINCT FROM mine.config_hash
        AND theirs.code_version IS NOT DISTINCT FROM mine.code_version
    WHERE mine.digest = $champion AND theirs.digest IS NOT DISTINCT FROM $predecessor
    ORDER BY mine.item
"""


class Made(NamedTuple):
    """What scores were made with.

    The suite's version, which has those of the verifier's rule and of the base's tokenizer and template; a
    hash of the engine's settings; and the code.
    """

    suite_version: str
    config_hash: str
    code_version: str


@dataclass(frozen=True)
class CommonScores:
    """The scores in [0, 1] of champion and predecessor on the same items.

    `began` is when the first of these pairs was there, `at` the time of the oldest that is newest of its item
    (epoch seconds).
    """

    made: Made
    champion: tuple[float, ...]
    predecessor: tuple[float, ...]
    began: float
    at: float


def looks(
    ledger: duckdb.DuckDBPyConnection,
    base: str,
    policy: str,
    suite: str,
    champion: str,
    predecessor: str | None,
) -> list[CommonScores]:
    """Return the looks at a champion on a suite, the first one first; a predecessor of None is the base."""
    named = {"base": base, "policy": policy, "suite": suite, "champion": champion, "predecessor": predecessor}
    by_made: dict[Made, list[tuple[float, ...]]] = defaultdict(list)
    for *made, mine, theirs, began, at in ledger.execute(PAIRS, named).fetchall():
        by_made[Made(*made)].append((mine, theirs, began, at))
    found = []
    for key, pairs in by_made.items():
        mine, theirs, began, at = zip(*pairs, strict=True)
        found.append(CommonScores(key, mine, theirs, min(began), min(at)))
    return sorted(found, key=lambda look: look.began)
