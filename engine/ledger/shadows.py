"""Feeds a shadow's judge from the ledger."""

import duckdb

from engine.catalog.records import Release
from engine.ledger.evaluations import ShadowPairRow, pair_scores, shadow_cost, shadow_pairs
from engine.quality.shadow import ShadowAnswer, ShadowJudge, ShadowPair, ShadowResult
from engine.settings.releases import ReleaseConfig


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
        if pairs := shadow_pairs(ledger, release, self._taken):
            scores = pair_scores(ledger, release, pairs)
            for pair in pairs:
                mine, theirs = (self._of_rules(scores.get(id, {})) for id in (pair.answer, pair.request))
                self._judge.observe(_pair(pair, mine, theirs))
                self._taken.add(pair.id)
            self.cost = shadow_cost(ledger, release)
        return self.result

    @property
    def result(self) -> ShadowResult:
        """What all pairs so far say."""
        return self._judge.result()

    def _of_rules(self, scores: dict[tuple[str, str], float]) -> dict[str, float]:
        return {name: score for (name, rule), score in scores.items() if self._rules.get(name) == rule}


def _pair(row: ShadowPairRow, mine: dict[str, float], theirs: dict[str, float]) -> ShadowPair:
    return ShadowPair(
        row.key,
        row.unit,
        ShadowAnswer(row.status, row.outcome, row.length, mine),
        ShadowAnswer(row.baseline_status, row.baseline_outcome, row.baseline_length, theirs),
    )
