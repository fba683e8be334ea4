"""Feeds a shadow's judge from the ledger."""

from collections import defaultdict
from collections.abc import Sequence

import duckdb

from engine.catalog.records import Release
from engine.ledger.evaluations import shadow_cost
from engine.quality.shadow import ShadowAnswer, ShadowJudge, ShadowPair, ShadowResult
from engine.settings.releases import ReleaseConfig

# No answer of a release began more than an hour before it, and older ones are many.
PAIRS = """
    SELECT shadows.id, shadows.request, shadows.answer, shadows.key, shadows.unit,
        mine.status, mine.outcome, mine.completion_tokens,
        theirs.status, theirs.outcome, theirs.completion_tokens
    FROM shadows JOIN observations theirs ON theirs.id = shadows.request AND theirs."at" >= $since - 3600
        JOIN observations mine ON mine.id = shadows.answer AND mine."at" >= $since - 3600
    WHERE shadows.release = $release AND shadows.id NOT IN (SELECT unnest($known::VARCHAR[]))
    ORDER BY shadows.rowid
"""
PAIR_SCORES = """
    SELECT request, evaluator, version, score FROM evaluations
    WHERE release = $release AND score IS NOT NULL AND request IN (SELECT unnest($answers::VARCHAR[]))
"""


class ShadowReader:
    """Feeds one shadow's judge; the scores are those of each evaluator's version at the release's start."""

    def __init__(self, release: Release):
        settings = ReleaseConfig.stored(release.settings)
        self._judge = ShadowJudge(settings, release.baseline is None)
        self._rules = {name: one.version for name, one in settings.evaluators.items()}
        self._taken: set[str] = set()
        # Its answers, the engine's seconds for them and their tokens.
        self.cost: tuple[int, float, int] = (0, 0.0, 0)

    def read(self, ledger: duckdb.DuckDBPyConnection, release: Release) -> ShadowResult:
        """Take the pairs that are new, and return what all say."""
        asked = {"release": release.id, "since": release.created_at, "known": list(self._taken)}
        if pairs := ledger.execute(PAIRS, asked).fetchall():
            scores = self._scores(ledger, release, [answer for pair in pairs for answer in pair[1:3]])
            for id, request, answer, key, unit, *told in pairs:
                mine = ShadowAnswer(*(*told[:3], scores[answer]))
                theirs = ShadowAnswer(*(*told[3:], scores[request]))
                self._judge.observe(ShadowPair(key, unit, mine, theirs))
                self._taken.add(id)
            self.cost = shadow_cost(ledger, release)
        return self.result

    @property
    def result(self) -> ShadowResult:
        """What all pairs so far say."""
        return self._judge.result()

    def _scores(
        self, ledger: duckdb.DuckDBPyConnection, release: Release, answers: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """Return the scores of answers: by answer and evaluator."""
        scores: dict[str, dict[str, float]] = defaultdict(dict)
        asked = {"release": release.id, "answers": answers}
        for answer, evaluator, rule, score in ledger.execute(PAIR_SCORES, asked).fetchall():
            if self._rules.get(evaluator) == rule:
                scores[answer][evaluator] = score
        return scores
