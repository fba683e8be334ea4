"""Reads the evidence for a release from ledger and catalog.

What a running canary's judge has taken is cached, so it takes only what is new.
"""

import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import Evidence
from engine.controller.offline_scores import KeptScore, LanguageScore, OfflineScore
from engine.ledger.canaries import CanaryReader
from engine.ledger.estimates import BASE, newest_estimates
from engine.ledger.evaluations import evaluator_uses
from engine.ledger.ledger import Ledger
from engine.ledger.queries import latest_scores, recent_units_per_s
from engine.ledger.shadows import ShadowReader
from engine.problems.general_text import GENERAL
from engine.quality.canary import CanaryResult
from engine.quality.estimate import paired_difference, perplexity
from engine.settings.releases import ReleaseConfig

# The first step in which evaluators score answers, and those after it.
SINCE_SHADOW = ("shadow", "approval", "canary")


class EvidenceReader:
    """Reads evidence on the thread that owns the ledger; `clock` is monotonic.

    `without` tells which engines lack a revision (policy, digest, base), and why: a canary waits for them.
    """

    def __init__(
        self,
        catalog: Catalog,
        clock: Callable[[], float] = time.monotonic,
        without: Callable[[str, str, str], dict[str, str]] = lambda policy, digest, base: {},
    ):
        self._catalog = catalog
        self._clock = clock
        self._engines_without = without
        # Of each running release: its gate, its canary's weight, and the approval that it asks for.
        self._ran: dict[tuple[str, str], _Ran] = {}
        self._canaries: dict[str, CanaryReader] = {}
        self._shadows: dict[str, ShadowReader] = {}
        # The opened ledger whose rows they have taken.
        self._taken_from = -1

    def read(self, release: Release, ledger: Ledger) -> Evidence:
        """Return the current evidence for a release."""
        now, revision = time.time(), self._catalog.revisions.get(release.policy, release.revision)
        stone = self._catalog.tombstones.find(release.policy, release.revision)
        # Before its users come.
        is_awaited = release.step == "canary" and release.canary_started_at is None
        evaluates = bool(release.settings.get("evaluators")) and release.step in SINCE_SHADOW
        shadow = self._shadow(release, ledger) if evaluates else None
        return Evidence(
            now=now,
            route=self._catalog.routes.get(release.policy),
            probe=revision.probe,
            **(self._offline(release, revision.base, ledger) if release.step == "score" else {}),
            canary=self._canary(release, ledger),
            tombstone=stone.reason if stone else None,
            frozen=self._catalog.switches.is_on("freeze"),
            step_s=self._since(release, "gate", (release.step, release.canary_started_at)),
            weight_s=self._since(release, "weight", (release.canary_started_at, release.weight)),
            asked_s=self._since(release, "approval", (release.asked,)) if release.asked else 0.0,
            units_per_s=recent_units_per_s(ledger.connection, release.policy, now) if is_awaited else None,
            without=self._engines_without(release.policy, release.revision, revision.base)
            if is_awaited
            else {},
            shadow=shadow.result if shadow else None,
            uses=tuple(evaluator_uses(ledger.connection, release)) if evaluates else (),
            shadow_cost=shadow.cost if shadow else (0, 0.0, 0),
        )

    def forget(self, release_id: str) -> None:
        """Drop what is cached of a release."""
        self._canaries.pop(release_id, None)
        self._shadows.pop(release_id, None)
        for kind in ("gate", "weight", "approval"):
            self._ran.pop((release_id, kind), None)

    def _since(self, release: Release, kind: str, now_at: tuple[object, ...]) -> float:
        """Return for how long a release has been at a gate or a weight, independently of the wall clock.

        Time does not count while it is paused; nor, but for an approval's own, while a step waits for one.
        """
        now, known = self._clock(), self._ran.get((release.id, kind))
        is_stopped = bool(release.paused or (release.asked and kind != "approval"))
        if known is None:
            ran_s = _ran_before(release, kind)
        elif known.at == now_at:
            ran_s = known.seconds + (0.0 if known.is_stopped else now - known.clock)
        else:
            ran_s = 0.0
        self._ran[release.id, kind] = _Ran(now_at, ran_s, now, is_stopped)
        return ran_s

    def _offline(self, release: Release, base: str, ledger: Ledger) -> dict[str, Any]:
        """Return the evidence of the score gate."""
        config = self._catalog.policies.get(release.policy).config
        return {
            "score": _score(release, base, ledger, config),
            "language": _language(release, base, ledger) if config.get("general") else None,
            "kept": _kept(release, base, ledger, config.get("keeps")),
        }

    def _shadow(self, release: Release, ledger: Ledger) -> ShadowReader | None:
        """Return what has read the shadow; after its gate that no longer changes."""
        if not ReleaseConfig.stored(release.settings).shadow_evaluators:
            return None
        self._renew(ledger)
        reader = self._shadows.get(release.id)
        is_new = reader is None
        if reader is None:
            reader = self._shadows[release.id] = ShadowReader(release)
        if is_new or release.step == "shadow":
            reader.read(ledger.connection, release)
        return reader

    def _canary(self, release: Release, ledger: Ledger) -> CanaryResult:
        if release.canary_started_at is None:
            return CanaryResult()
        self._renew(ledger)
        reader = self._canaries.setdefault(release.id, CanaryReader(release))
        return reader.read(ledger.connection, release)

    def _renew(self, ledger: Ledger) -> None:
        """Forget what was taken of another file: its rows have other numbers."""
        if self._taken_from != ledger.number:
            self._canaries.clear()
            self._shadows.clear()
            self._taken_from = ledger.number


class _Ran(NamedTuple):
    """How long a release was `at` a gate or weight when `clock` was read, and whether its time stood then."""

    at: tuple[object, ...]
    seconds: float
    clock: float
    is_stopped: bool


def _ran_before(release: Release, kind: str) -> float:
    """Return the same after a restart, when only the wall clock tells when it began."""
    starts = {
        "gate": release.canary_started_at,
        "weight": release.updated_at,
        "approval": release.asked and release.asked["asked_at"],
    }
    now, at = time.time(), starts[kind] or release.updated_at
    return max(0.0, now - at - release.stopped_s(at, now, kind == "approval"))


def _score(release: Release, base: str, ledger: Ledger, config: Mapping[str, Any]) -> OfflineScore | None:
    suite, verifier = config.get("suite", ""), config.get("verifier", "")
    if release.revision == release.baseline:
        return None
    mine, theirs = _common_scores(ledger, base, release, suite, release.baseline)
    if not mine:
        return _part_score(ledger, base, release, suite, verifier, config.get("score_reads", "all"))
    low = paired_difference(mine, theirs).low
    return OfflineScore(len(mine), fmean(mine), fmean(theirs), low, verifier)


def _language(release: Release, base: str, ledger: Ledger) -> LanguageScore:
    mine, theirs = _common_scores(ledger, base, release, GENERAL, None)
    if not mine:
        return LanguageScore(0, 0.0, 0.0)
    return LanguageScore(len(mine), perplexity(mine), perplexity(theirs))


def _kept(release: Release, base: str, ledger: Ledger, suite: str | None) -> KeptScore | None:
    if not suite or release.revision == release.baseline:
        return None
    mine, theirs = _common_scores(ledger, base, release, suite, release.baseline)
    if not mine:
        return KeptScore(suite, 0)
    return KeptScore(suite, len(mine), fmean(mine), fmean(theirs), paired_difference(mine, theirs).high)


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


def _part_score(
    ledger: Ledger, base: str, release: Release, suite: str, verifier: str, target: str
) -> OfflineScore | None:
    """Return what a part of the suite's items showed last, beside the baseline's scores on all of them.

    Only where the policy is scored so, by the `target` that it names.
    """
    against = release.baseline or BASE
    found = [
        one
        for one in newest_estimates(ledger.connection, base, release.policy, suite)
        if (one.digest, one.against, one.segment, one.target) == (release.revision, against, None, target)
    ]
    if not found:
        return None
    newest = max(found, key=lambda one: one.at or 0.0)
    of_baseline = latest_scores(ledger.connection, base, release.policy, suite, release.baseline)
    theirs = [one.score for one in of_baseline if one.version == newest.suite_version]
    if not theirs:
        return None
    mean = fmean(theirs)
    return OfflineScore(newest.items, mean + newest.mean, mean, newest.low, verifier, newest.target)
