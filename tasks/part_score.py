"""Scores a revision on a part of a suite: as many items as show whether it has fallen below its baseline.

The items are chosen while they are read (`engine.quality.regression`), so their plain mean is not the
suite's: the ledger has them as `readings`, and what they show as `estimates`. Which are chosen depends on the
revision, the suite and the outcomes, so that a run which goes on after a crash reads the same items.
"""

import hashlib
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.catalog.opening import open_catalog
from engine.errors import Conflict
from engine.ledger.estimates import BASE, Estimate, emit_estimate, has_estimates
from engine.ledger.ledger import open_ledger
from engine.ledger.queries import known_outcomes
from engine.ledger.sender import open_spool
from engine.quality.regression import RegressionReading, Target
from engine.settings.params import DIGEST12, Params
from tasks.score import Score, ask_engine, emit_scores, engine_hash, in_force, score
from tasks.suites import Suite, load_suite

# Items that are asked for at once: few, since each outcome helps to choose the next.
AT_ONCE = 16


class PartScore(NamedTuple):
    """What a part of a suite's items says of a revision.

    `own` is its mean, `difference` the difference to its baseline; `has_fallen` is whether the score gate
    will hold it.
    """

    own: Estimate
    difference: Estimate
    has_fallen: bool


def champion_beside(params: Params, policy: str, digest: str) -> str | None:
    """Return the champion, the baseline of a release of `digest`, if it is another one of its base."""
    with open_catalog(params.paths) as catalog:
        champion, revision = catalog.routes.get(policy).champion, catalog.revisions.get(policy, digest)
        same_base = champion and catalog.revisions.get(policy, champion).base == revision.base
    return champion if champion != digest and same_base else None


def made_at(params: Params, policy: str, digest: str) -> float:
    """Return when a revision was made, in epoch seconds."""
    with open_catalog(params.paths) as catalog:
        return catalog.revisions.get(policy, digest).created_at


def score_champion(params: Params, policy: str, digest: str, suite: str, key: str) -> Score | None:
    """Score the champion that a release of `digest` has as its baseline on all items; None where it has none.

    Raises what `tasks.score.score` raises.
    """
    champion = champion_beside(params, policy, digest)
    return score(params, policy, champion, suite, key) if champion else None


def score_part(
    params: Params,
    policy: str,
    digest: str,
    baseline: Score,
    key: str,
    target: Target,
    made_at: float,
) -> PartScore:
    """Score `policy`'s revision `digest` on as many items as the score gate needs beside `baseline`.

    `baseline` is the score of another revision or of the base on all items of the suite. What was scored
    after `made_at` (epoch seconds), when the revision was made, predicts nothing: reading again reads the
    same items, so that nobody can try until the gate opens. Raises what `tasks.score.score` raises.
    """
    started = time.monotonic()
    suite, base = in_force(params, load_suite(baseline.suite, params.suites_dir))
    scored, now = (baseline.base, baseline.suite_version), (base, suite.version)
    if scored != now:
        raise Conflict(
            f"The baseline was scored on version {scored[1]} of the suite {suite.name} with the base "
            f"{scored[0][:DIGEST12]}; version {now[1]} and the base {now[0][:DIGEST12]} are in force. Score "
            "both again."
        )
    run = f"{policy}@{digest}/{baseline.run}/{target}"
    reading = _reading(params, run, policy, digest, suite, baseline, target, made_at)
    while chosen := reading.choose(AT_ONCE):
        (wait,) = ask_engine(params, [(policy, digest)], suite, key, chosen)
        by_item = {one.item: one for one in wait()[0]}
        items = [by_item[suite.items[place].id] for place in chosen]
        emit_scores(params, baseline.base, policy, digest, suite, items, is_part=True)
        reading.add([one.score for one in items])
    seconds = time.monotonic() - started
    own = Estimate(
        policy, digest, baseline.base, suite.name, suite.version, target, *reading.own, reading.items,
        len(suite.items), seconds=seconds, config_hash=engine_hash(params),
    )  # fmt: skip
    difference = replace(own, **reading.difference._asdict(), against=baseline.digest or BASE)
    with closing(open_spool(params, "score")) as spool:
        for estimate in (own, difference):
            emit_estimate(spool, estimate, run)
    return PartScore(own, difference, reading.has_fallen)


def _reading(
    params: Params, run: str, policy: str, digest: str, suite: Suite, baseline: Score, target: Target,
    made_at: float,
) -> RegressionReading:  # fmt: skip
    """Return the reading before its first item, with what earlier revisions tell."""
    earlier: Mapping[str | None, Mapping[str, float]] = {}
    with open_ledger(params.paths.ledger_snapshot) as ledger:
        # A snapshot of an earlier version has no readings.
        if has_estimates(ledger):
            earlier = known_outcomes(ledger, baseline.base, policy, suite.name, suite.version, made_at)
    siblings = [known for other, known in earlier.items() if other not in (digest, baseline.digest)]
    outcomes_HN = np.array([[known.get(item.id, np.nan) for item in suite.items] for known in siblings])
    return RegressionReading(
        target,
        np.array([one.score for one in baseline.items]),
        outcomes_HN.reshape(len(siblings), len(suite.items)),
        [item.segment for item in suite.items],
        int.from_bytes(hashlib.sha256(run.encode()).digest()[:8]),
        params.release.score_margin,
    )
