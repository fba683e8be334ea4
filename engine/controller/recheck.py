"""Looks at a champion again beside its predecessor, the revision that a rollback would put in its place.

Pure rules say when a look is due and when the champion has lost. The greedy answers to a suite's items are no
new draw when they are asked for again: what is random is which items the suite has of its task, and what a
change of suite, rule, text files, engine or code makes of them. So an error has one chance for each of these
changes, not for each look, and look k has the level ALPHA / (k (k + 1)), which sum to ALPHA over all of them.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from engine.catalog.catalog import Catalog, Notice, Revision
from engine.controller.due import days
from engine.controller.release_loop import Controller
from engine.errors import NotFound
from engine.ledger.ledger import Ledger
from engine.ledger.looks import CommonScores, Made, looks
from engine.quality.estimate import paired_difference

# The probability that a champion which has not lost is ever said to have.
ALPHA = 0.05
ROLLED_BACK = "graftwork.champion.rolled_back"
NAMES = uuid.UUID("5b3c2f0e-3d67-5c0d-8f0c-0f4f0a8b1d52")


@dataclass(frozen=True)
class Pair:
    """A policy's champion and its predecessor's digest, None for the base; or why it is not looked at."""

    champion: Revision | None = None
    predecessor: str | None = None
    blocked: str = ""


@dataclass(frozen=True)
class Recheck:
    """What a look has found, and its reason in a sentence."""

    state: Literal["kept", "lost", "rolled_back", "skipped"]
    reason: str


def pair_of(catalog: Catalog, policy: str) -> Pair:
    """Return a policy's champion and predecessor, unless it cannot be looked at now."""
    try:
        row, route = catalog.policies.get(policy), catalog.routes.get(policy)
    except NotFound:
        return Pair(blocked="It has no revision yet.")
    if route.champion is None:
        return Pair(blocked="It has no champion: the base answers.")
    champion = catalog.revisions.find(policy, route.champion)
    if champion is None:
        return Pair(blocked=f"Its champion {route.champion[:12]} is no longer in the catalog.")
    if champion.base != row.base:
        return Pair(blocked=f"Its champion was trained on another base, {champion.base[:12]}.")
    if running := catalog.releases.all(policy, open_only=True):
        return Pair(blocked=f"Its release of {running[0].revision[:12]} is running.")
    # A rollback leaves out a predecessor with a tombstone.
    if route.previous is None or catalog.tombstones.find(policy, route.previous):
        return Pair(champion)
    previous = catalog.revisions.find(policy, route.previous)
    if previous is None or previous.base != row.base:
        gone = "of another base" if previous else "no longer in the catalog"
        return Pair(blocked=f"Its predecessor {route.previous[:12]} is {gone}: there is nothing to compare.")
    return Pair(champion, previous.digest)


def due(seen: Sequence[CommonScores], made: Made, items: int, now: float, after_s: float) -> str | None:
    """Return why a look with what is in force, `made`, at so many items of the suite is due, else None."""
    same = next((look for look in seen if look.made == made and len(look.champion) >= items), None)
    if same:
        age_s = now - same.at
        return f"The last look was {days(age_s)} ago." if age_s > after_s else None
    if not seen:
        return "Champion and predecessor have not been scored together."
    last = max(seen, key=lambda look: look.at).made
    changed = [
        name
        for name, before, after in (
            ("suite, verifier, tokenizer or template", last.suite_version, made.suite_version),
            ("engine's settings", last.config_hash, made.config_hash),
            ("code", last.code_version, made.code_version),
        )
        if before != after
    ]
    return f"Changed since the last look: {', '.join(changed) or 'the items'}."


def judge(seen: Sequence[CommonScores], margin: float) -> tuple[bool, str]:
    """Return whether the newest look shows that the champion has lost, and the figures in a sentence.

    It has lost where the paired difference is shown to be below what a release may lose, for the task of
    which the suite's items are a sample.
    """
    last = max(seen, key=lambda look: look.at)
    number = 1 + list(seen).index(last)
    # Of a two-sided interval each side has half of the level.
    found = paired_difference(last.champion, last.predecessor, 2 * ALPHA / (number * (number + 1)))
    return found.high < -margin, (
        f"{fmean(last.champion):.3f}, and its predecessor {fmean(last.predecessor):.3f}, on "
        f"{len(last.champion)} items of version {last.made.suite_version}: a difference of "
        f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}] for the task, of which -{margin:g} is "
        f"allowed (look {number})."
    )


def recheck(controller: Controller, ledger: Ledger, policy: str, by: str) -> Recheck:
    """Judge a policy's champion by the ledger's scores; raise the alarm, or roll it back in the name of `by`.

    For the loop's thread. Raises `ConfigError` for a policy without settings.
    """
    params, catalog, decisions = controller.params, controller.catalog, controller.decisions
    config = params.policy(policy)
    with decisions.lock:
        pair = pair_of(catalog, policy)
        if pair.champion is None:
            return Recheck("skipped", pair.blocked)
        controller.lost.pop(policy, None)
        if config.recheck == "off":
            return Recheck("skipped", "Its setting `recheck` is off.")
        champion, before = pair.champion, pair.predecessor
        seen = looks(ledger.connection, champion.base, policy, config.suite, champion.digest, before)
        if not seen:
            return Recheck("skipped", "Champion and predecessor have no scores in common. Score both first.")
        has_lost, figures = judge(seen, params.release_of(policy).score_margin)
        if not has_lost:
            return Recheck("kept", f"The champion {champion.digest[:12]} has {figures}")
        reason = f"Looked at again, the champion {champion.digest[:12]} has lost: it has {figures}"
        if config.recheck == "rollback" and not decisions.frozen():
            # Told first: after a crash in between, the rollback is repeated, and this is the same notice.
            id = str(uuid.uuid5(NAMES, f"{policy}/{champion.digest}/{catalog.routes.get(policy).version}"))
            link, now = f"{params.url('controller')}/", time.time()
            catalog.notices.add(Notice(id, ROLLED_BACK, policy, champion.digest, reason, link, now))
            decisions.rollback(policy, champion.digest, by, reason)
            return Recheck("rolled_back", reason)
        if config.recheck == "rollback":
            reason += " Releases are frozen, so it stays."
        controller.lost[policy] = champion.digest, reason
        return Recheck("lost", reason)
