"""Reads the evidence for a release from ledger and catalog.

Only the first rated request of each unit counts. A running canary's units are cached, so the statistics are
updated only when new ones arrive.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import CanaryResult, Evidence, LanguageScore, OfflineScore
from engine.ledger.ledger import Ledger
from engine.ledger.queries import canary_rewards, latest_scores
from engine.problems.general_text import GENERAL
from engine.quality.estimate import perplexity
from engine.quality.sequential import CanaryComparison
from engine.settings.params import ReleaseConfig


@dataclass
class _Canary:
    """One running canary: rewards in order of arrival, and the result from them."""

    comparison: CanaryComparison
    units: set[str] = field(default_factory=set)
    canary: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    result: CanaryResult = field(default_factory=CanaryResult)


class EvidenceReader:
    """Reads evidence on the thread that owns the ledger; `clock` is monotonic."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float] = time.monotonic):
        self._catalog = catalog
        self._clock = clock
        # Of each running release: its step, the canary's start included, and when that began by the clock.
        self._steps: dict[str, tuple[tuple[str, float | None], float]] = {}
        self._canaries: dict[str, _Canary] = {}

    def read(self, release: Release, ledger: Ledger) -> Evidence:
        """Return the current evidence for a release."""
        revision = self._catalog.revisions.get(release.policy, release.revision)
        stone = self._catalog.tombstones.find(release.policy, release.revision)
        return Evidence(
            now=time.time(),
            route=self._catalog.routes.get(release.policy),
            probe=revision.probe,
            score=self._score(release, revision.base, ledger) if release.step == "score" else None,
            language=self._language(release, revision.base, ledger) if release.step == "score" else None,
            canary=self._canary(release, ledger),
            tombstone=stone.reason if stone else None,
            frozen=self._catalog.switches.is_on("freeze"),
            step_s=self._step_s(release),
        )

    def forget(self, release_id: str) -> None:
        """Drop what is cached of a release."""
        self._canaries.pop(release_id, None)
        self._steps.pop(release_id, None)

    def _step_s(self, release: Release) -> float:
        """Return how long a release has been at its step, independently of the wall clock."""
        now, step = self._clock(), (release.step, release.canary_started_at)
        known = self._steps.get(release.id)
        if known is None:
            # After a restart only the wall clock tells how long the step has lasted.
            began = now - max(0.0, time.time() - (release.canary_started_at or release.updated_at))
        else:
            began = known[1] if known[0] == step else now
        self._steps[release.id] = step, began
        return now - began

    def _score(self, release: Release, base: str, ledger: Ledger) -> OfflineScore | None:
        suite = self._catalog.policies.get(release.policy).config.get("suite", "")
        mine, theirs = _common_scores(ledger, base, release, suite, release.baseline)
        if not mine or release.revision == release.baseline:
            return None
        return OfflineScore(len(mine), fmean(mine), fmean(theirs))

    def _language(self, release: Release, base: str, ledger: Ledger) -> LanguageScore | None:
        if not self._catalog.policies.get(release.policy).config.get("general"):
            return None
        mine, theirs = _common_scores(ledger, base, release, GENERAL, None)
        if not mine:
            return LanguageScore(0, 0.0, 0.0)
        return LanguageScore(len(mine), perplexity(mine), perplexity(theirs))

    def _canary(self, release: Release, ledger: Ledger) -> CanaryResult:
        if release.canary_started_at is None:
            return CanaryResult()
        settings = ReleaseConfig.model_validate(release.settings)
        comparison = CanaryComparison(release.weight, settings.alpha, settings.margin)
        state = self._canaries.setdefault(release.id, _Canary(comparison))
        before = len(state.units)
        for _, unit, is_canary, reward in canary_rewards(ledger.connection, release):
            if unit not in state.units:
                state.units.add(unit)
                (state.canary if is_canary else state.baseline).append(reward)
        if len(state.units) > before:
            state.result = _compare(state)
        return state.result


def _common_scores(
    ledger: Ledger, base: str, release: Release, suite: str, other: str | None
) -> tuple[list[float], list[float]]:
    """Return the scores of a release's revision and of `other` (None: the base) on the items of both."""
    mine, theirs = (
        {
            (one.version, one.item): one.score
            for one in latest_scores(ledger.connection, base, release.policy, suite, digest)
        }
        for digest in (release.revision, other)
    )
    common = sorted(mine.keys() & theirs.keys())
    return [mine[item] for item in common], [theirs[item] for item in common]


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
