"""Gathers the facts about one revision for its page: scores, verdicts, lineage, training, probe.

Read from the catalog and the ledger's snapshot.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import duckdb

from engine.adapters.manifests import stored_manifest
from engine.catalog.opening import open_catalog
from engine.ledger.ledger import open_snapshot
from engine.ledger.queries import latest_scores, named_rows
from engine.quality.estimate import Difference, interval, paired_difference
from engine.settings.params import Params
from engine.training.service.train_step import TrainStep

VERDICTS = """
    SELECT "at", verdict, "by", reason FROM verdicts
    WHERE policy = ? AND digest = ? ORDER BY "at" DESC LIMIT 20
"""
# `SELECT *`: a snapshot written by an older version has fewer columns.
STEPS = """
    SELECT * FROM train_steps
    WHERE policy = ? AND session = ? AND step <= ? AND reward IS NOT NULL ORDER BY step
"""


@dataclass(frozen=True)
class MeanScore:
    """A suite's mean score with its 95% interval, in [0, 1], and when it was measured (epoch seconds)."""

    mean: float
    low: float
    high: float
    items: int
    at: float


@dataclass(frozen=True)
class VerdictRow:
    """One verdict; `at` is epoch seconds."""

    at: float
    verdict: str
    by: str
    reason: str


@dataclass(frozen=True)
class VersionFacts:
    """What a revision's page shows; `steps` are those of the training that produced it, in order."""

    policy: str
    digest: str
    parent: str | None
    champion: str | None
    suite: str
    bytes: int
    probe: dict[str, Any]
    children: tuple[str, ...] = ()
    score: MeanScore | None = None
    parent_score: MeanScore | None = None
    champion_score: MeanScore | None = None
    base_score: MeanScore | None = None
    against_champion: Difference | None = None
    verdicts: tuple[VerdictRow, ...] = ()
    steps: tuple[TrainStep, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the mean reward of each step."""
        return tuple(step.reward for step in self.steps if step.reward is not None)

    @property
    def tokens(self) -> int:
        """Return the number of trained tokens."""
        return sum(step.tokens or 0 for step in self.steps)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the steps' seconds by phase."""
        spent: Counter[str] = Counter()
        for step in self.steps:
            spent.update(step.phases)
        return dict(spent)


def gather(params: Params, policy: str, digest: str) -> VersionFacts:
    """Return the facts about a revision; raises `NotFound` for an unknown one."""
    with open_catalog(params.paths) as catalog:
        revision = catalog.revisions.get(policy, digest)
        champion = catalog.routes.get(policy).champion
        children = tuple(child.digest for child in catalog.listing.children(policy, revision.digest))
        config = catalog.policies.get(policy).config
    fixed: dict[str, Any] = {
        "policy": policy, "digest": revision.digest, "parent": revision.parent, "champion": champion,
        "suite": str(config.get("suite", "")), "bytes": revision.bytes,
        "probe": revision.probe or {}, "children": children,
    }  # fmt: skip
    if not params.paths.ledger_snapshot.is_file():
        return VersionFacts(**fixed)
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        measured = _measured(ledger, revision.base, fixed)
        steps = _trained(ledger, params, policy, revision.digest, revision.step)
    return VersionFacts(**fixed, **measured, steps=steps)


def _measured(ledger: duckdb.DuckDBPyConnection, base: str, fixed: dict[str, Any]) -> dict[str, Any]:
    def items(digest: str | None) -> dict[str, tuple[float, float]]:
        found = latest_scores(ledger, base, fixed["policy"], fixed["suite"], digest)
        return {one.item: (one.score, one.at) for one in found if one.is_newest}

    mine, champion = items(fixed["digest"]), items(fixed["champion"])
    common = sorted(set(mine) & set(champion))
    against = None
    if common and fixed["champion"] != fixed["digest"]:
        against = paired_difference([mine[i][0] for i in common], [champion[i][0] for i in common])
    said = ledger.execute(VERDICTS, [fixed["policy"], fixed["digest"]]).fetchall()
    return {
        "score": _mean(mine),
        "base_score": _mean(items(None)),
        "parent_score": _mean(items(fixed["parent"])) if fixed["parent"] else None,
        "champion_score": _mean(champion) if fixed["champion"] else None,
        "against_champion": against,
        "verdicts": tuple(VerdictRow(*row) for row in said),
    }


def _mean(items: dict[str, tuple[float, float]]) -> MeanScore | None:
    if not items:
        return None
    scores = [score for score, _ in items.values()]
    return MeanScore(fmean(scores), *interval(scores), len(scores), max(at for _, at in items.values()))


def _trained(
    ledger: duckdb.DuckDBPyConnection, params: Params, policy: str, digest: str, step: int
) -> tuple[TrainStep, ...]:
    manifest = stored_manifest(params.paths.revision(policy, digest))
    session = manifest.get("config", {}).get("session")
    return tuple(map(TrainStep.of, named_rows(ledger.execute(STEPS, [policy, session, step]))))
