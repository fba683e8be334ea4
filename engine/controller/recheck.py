"""Looks at a champion again beside its predecessor, the revision that a rollback would put in its place.

Pure rules say when a look is due and when the champion has lost. The greedy answers to a suite's items are no
new draw when they are asked for again: what is random is which items the suite has of its task, and what a
change of suite, rule, text files, engine or code makes of them. So an error has one chance for each of these
changes, not for each look, and look k has the level ALPHA / (k (k + 1)), which sum to ALPHA over all of them.
"""

import time
import uuid
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

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


class Pair(NamedTuple):
    """A policy's champion and its predecessor's digest, None for the base; or why it is not looked at."""

    champion: Revision | None = None
    predecessor: str | None = None
    blocked: str = ""


def pair_of(catalog: Catalog, policy: str) -> Pair:
    """Return a policy's champion and predecessor, unless it cannot be looked at now."""
    try:
        row, route = catalog.policies.get(policy), catalog.routes.get(policy)
    except NotFound:
        return Pair(blocked="It has no revision yet.")
    if route.champion is None:
        return Pair(blocked="It has no champion: the base answers.")
    if running := catalog.releases.all(policy, open_only=True):
        return Pair(blocked=f"Its release of {running[0].revision[:12]} is running.")
    # A rollback leaves out a predecessor with a tombstone.
    has_previous = route.previous and not catalog.tombstones.find(policy, route.previous)
    predecessor = route.previous if has_previous else None
    for role, digest in (("champion", route.champion), ("predecessor", predecessor)):
        revision = catalog.revisions.find(policy, digest) if digest else None
        if digest and (revision is None or revision.base != row.base):
            gone = "of another base" if revision else "no longer in the catalog"
            return Pair(blocked=f"Its {role} {digest[:12]} is {gone}: there is nothing to compare.")
    return Pair(catalog.revisions.find(policy, route.champion), predecessor)


def due(seen: Sequence[CommonScores], made: Made, items: int, now: float, after_s: float) -> str | None:
    """Return why a look with what is in force, `made`, at so many items of the suite is due, else None."""
    same = next((look for look in seen if look.made == made and len(look.champion) >= items), None)
    if same:
        age_s = now - same.at
        return f"The last look was {days(age_s)} ago." if age_s > after_s else None
    if not seen:
        return "Champion and predecessor have not been scored together."
    last = max(seen, key=lambda look: look.at).made
    parts = ("suite, verifier, tokenizer or template", "engine's settings", "code")
    changed = [part for part, old, new in zip(parts, last, made, strict=True) if old != new]
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


def recheck(controller: Controller, ledger: Ledger, policy: str, by: str) -> tuple[str, str]:
    """Judge a policy's champion by the ledger's scores; raise the alarm, or roll it back in the name of `by`.

    Return kept, lost, rolled_back or skipped, and the reason in a sentence. For the loop's thread. Raises
    `ConfigError` for a policy without settings.
    """
    params, catalog, decisions = controller.params, controller.catalog, controller.decisions
    config = params.policy(policy)
    with decisions.lock:
        champion, predecessor, blocked = pair_of(catalog, policy)
        if champion is None:
            return "skipped", blocked
        controller.lost.pop(policy, None)
        if config.recheck == "off":
            return "skipped", "Its setting `recheck` is off."
        digest, base = champion.digest, champion.base
        seen = looks(ledger.connection, config.suite, base, policy, digest, predecessor)
        if not seen:
            return "skipped", "Champion and predecessor have no scores in common. Score both first."
        has_lost, figures = judge(seen, params.release_of(policy).score_margin)
        if not has_lost:
            return "kept", f"The champion {digest[:12]} has {figures}"
        reason = f"Looked at again, the champion {digest[:12]} has lost: it has {figures}"
        if config.recheck == "rollback" and not decisions.frozen():
            # Told first: after a crash in between, the rollback is repeated, and this is the same notice.
            id = str(uuid.uuid5(NAMES, f"{policy}/{digest}/{catalog.routes.get(policy).version}"))
            link = f"{params.url('controller')}/"
            catalog.notices.add(Notice(id, ROLLED_BACK, policy, digest, reason, link, time.time()))
            decisions.rollback(policy, digest, by, reason)
            return "rolled_back", reason
        controller.lost[policy] = digest, reason
        return "lost", reason
