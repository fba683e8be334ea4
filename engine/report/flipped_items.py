"""The items that a revision has won and lost, with both answers: a mean hides opposite movements."""

from typing import Any

import duckdb

from engine.catalog.records import Revision, Route
from engine.ledger.queries import newest_items
from engine.report.links import Link
from engine.settings.params import DIGEST12

# Most items of each list, and characters of a text in a sentence.
SHOWN, EXCERPT = 10, 80


def other_of(route: Route, revision: Revision) -> tuple[str | None, str]:
    """Return what a revision is compared with, None for the base, and its name in words.

    It is the champion, of the champion the one before, or else the parent.
    """
    against, role = revision.parent, "parent"
    if route.champion and route.champion != revision.digest:
        against, role = route.champion, "champion"
    elif route.champion and route.previous:
        against, role = route.previous, "previous champion"
    return against, f"the {role} {against[:DIGEST12]}" if against else "the base"


def flipped_items(ledger: duckdb.DuckDBPyConnection, suite: str, revision: Revision, route: Route) -> Link:
    """Return what a revision has won and lost by the newest scores on the suite's newest version.

    Its facts are the number of `items` that both have answered, those `won` and `lost`, and of each the
    first, whose scores differ most.
    """
    against, other = other_of(route, revision)
    mine, theirs = (
        newest_items(ledger, revision.base, revision.policy, suite, digest)
        for digest in (revision.digest, against)
    )
    pairs = [
        _pair(mine[item], theirs[item])
        for item in sorted(mine.keys() & theirs.keys())
        # Answers by other settings of the engine are no flips of the revision's.
        if mine[item]["config_hash"] == theirs[item]["config_hash"]
    ]
    pairs.sort(key=lambda one: -abs(one["score"] - one["other_score"]))
    won = [one for one in pairs if one["score"] > one["other_score"]]
    lost = [one for one in pairs if one["score"] < one["other_score"]]
    facts = {
        "against": against, "items": len(pairs), "won": len(won), "lost": len(lost),
        "won_items": won[:SHOWN], "lost_items": lost[:SHOWN],
    }  # fmt: skip
    if not pairs:
        return Link("items", False, f"No item has a score of both it and {other}.", facts)
    lines = [f"{len(won)} won and {len(lost)} lost of {len(pairs)} against {other}."]
    shown = sorted(won[:SHOWN] + lost[:SHOWN], key=lambda one: str(one["item"]))
    lines += [_line("won" if one in won else "lost", one) for one in shown]
    return Link("items", True, "\n".join(lines), facts)


def _pair(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    named = {name: mine.get(name) for name in ("item", "segment", "question", "score", "answer")}
    return named | {"other_score": theirs["score"], "other_answer": theirs.get("answer")}


def _line(change: str, one: dict[str, Any]) -> str:
    kind = f" ({one['segment']})" if one["segment"] else ""
    answers = f"{excerpt(one['answer'])}, the other {excerpt(one['other_answer'])}"
    return f"- {change} {one['item']}{kind}: {excerpt(one['question'])} → {answers}"


def excerpt(text: str | None) -> str:
    """Return the beginning of a text on one line, as code; backticks in it would end that."""
    words = " ".join((text or "").replace("`", "'").split())
    return f"`{words[:EXCERPT]}…`" if len(words) > EXCERPT else f"`{words}`" if words else "nothing"
