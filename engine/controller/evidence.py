"""What the ledger and the catalog say about a release.

Knows which events count: rewards of users only, the first rated request of each unit, and nobody
without a unit. Keeps what it has seen of each running canary, so that a look costs only what is new.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import CanaryResult, Evidence, OfflineScore
from engine.ledger.ledger import Ledger
from engine.quality.sequential import CanaryComparison
from engine.settings.params import ReleaseConfig

REWARDS = """
    WITH first AS (
        SELECT request_id, key, arg_min(reward, rowid) AS reward, min(rowid) AS seq
        FROM feedback WHERE "at" >= $started AND reward BETWEEN 0 AND 1 GROUP BY ALL
    )
    SELECT unit, arm = 'canary', reward
    FROM observations JOIN first ON request_id = observations.id AND first.key = observations.key
    WHERE policy = $policy AND "at" >= $started AND purpose = 'user' AND unit IS NOT NULL
        AND ((arm = 'canary' AND digest = $revision)
            OR (arm IN ('champion', 'base') AND digest IS NOT DISTINCT FROM $baseline))
    ORDER BY seq
"""

PAIRED_SCORES = """
    WITH latest AS (
        SELECT digest IS NOT DISTINCT FROM $revision AS mine, suite_version, item,
            arg_max(score, "at") AS score
        FROM scores
        WHERE suite = $suite AND base = $base AND (digest IS NULL OR policy = $policy)
            AND (digest = $revision OR digest IS NOT DISTINCT FROM $baseline)
        GROUP BY ALL
    )
    SELECT count(*), avg(revision.score), avg(baseline.score)
    FROM latest AS revision JOIN latest AS baseline USING (suite_version, item)
    WHERE revision.mine AND NOT baseline.mine
"""


@dataclass
class _Canary:
    """One running canary: rewards by order of arrival, and the evidence from them."""

    comparison: CanaryComparison
    units: set[str] = field(default_factory=set)
    canary: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    result: CanaryResult = field(default_factory=CanaryResult)


class EvidenceReader:
    """Reads evidence for the one thread that owns the ledger."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._canaries: dict[str, _Canary] = {}

    def read(self, release: Release, ledger: Ledger) -> Evidence:
        """Return what is known about a release now."""
        revision = self._catalog.revisions.get(release.policy, release.revision)
        stone = self._catalog.tombstones.find(release.policy, release.revision)
        return Evidence(
            now=time.time(),
            route=self._catalog.routes.get(release.policy),
            probe=revision.probe,
            score=self._score(release, revision.base, ledger) if release.step == "score" else None,
            canary=self._canary(release, ledger),
            tombstone=stone.reason if stone else None,
            frozen=self._catalog.switches.is_on("freeze"),
        )

    def forget(self, release_id: str) -> None:
        self._canaries.pop(release_id, None)

    def _score(self, release: Release, base: str, ledger: Ledger) -> OfflineScore | None:
        suite = self._catalog.policies.get(release.policy).config.get("suite")
        named = {"suite": suite, "base": base, "policy": release.policy}
        named |= {"revision": release.revision, "baseline": release.baseline}
        row = ledger.connection.execute(PAIRED_SCORES, named).fetchone()
        return OfflineScore(*row) if row and row[0] else None

    def _canary(self, release: Release, ledger: Ledger) -> CanaryResult:
        if release.canary_started_at is None:
            return CanaryResult()
        settings = ReleaseConfig.model_validate(release.settings)
        comparison = CanaryComparison(release.weight, settings.alpha, settings.margin)
        state = self._canaries.setdefault(release.id, _Canary(comparison))
        named = {"started": release.canary_started_at, "policy": release.policy}
        named |= {"revision": release.revision, "baseline": release.baseline}
        before = len(state.units)
        for unit, is_canary, reward in ledger.connection.execute(REWARDS, named).fetchall():
            if unit not in state.units:
                state.units.add(unit)
                (state.canary if is_canary else state.baseline).append(reward)
        if len(state.units) > before:
            state.result = _compare(state)
        return state.result


def _compare(state: _Canary) -> CanaryResult:
    canary, baseline = np.array(state.canary, dtype=float), np.array(state.baseline, dtype=float)
    state.comparison.update(canary, baseline)
    return CanaryResult(
        canary_units=len(canary),
        baseline_units=len(baseline),
        canary_reward=float(canary.mean()) if len(canary) else None,
        baseline_reward=float(baseline.mean()) if len(baseline) else None,
        pairs=state.comparison.pairs,
        lower=state.comparison.lower,
        upper=state.comparison.upper,
    )
