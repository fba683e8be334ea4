"""Renders the HTML report: one file that opens offline, with every plot and style inline.

Each plot has a text alternative for screen readers. The data come from `collect.py`, the plots from
`charts.py`, `training.py` and `lineage.py`, the page from `report.html`. The controller serves it live.
"""

import math
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from engine.catalog.records import ENDS, served_name
from engine.files import write_whole
from engine.quality.guards import GuardResult
from engine.report import charts, training
from engine.report.collect import MAX_POLICIES, collect
from engine.report.data import Curve, PolicyRow, ReleaseResult, ReportData, RevisionRow, SuiteScore
from engine.report.lineage import lineage, spoken
from engine.settings.params import DIGEST12

__all__ = ["MAX_POLICIES", "ReportData", "collect", "render", "write_report"]

MAX_CANARIES = 12


def write_report(data: ReportData, path: Path) -> Path:
    """Write the report to `path` atomically and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, render(data))
    return path


def render(data: ReportData, live: bool = False) -> str:
    """Return the page as HTML; a live one reloads itself from its URL every few seconds."""
    return _template().render(
        data=data,
        live=live,
        plots=_plots(data),
        words=charts.STATE_WORDS,
        verdicts=ENDS,
        longest=max((seconds for _, seconds in data.stages), default=0) or 1,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": _moment, "score": _score, "digest": _digest, "interval": _interval}
    return environment.get_template("report.html")


def _plots(data: ReportData) -> dict[str, Any]:
    scores = _score_rows(data)
    canaries = [release for release in data.releases if release.timeline]
    return {
        "lineage": [
            figure for policy in data.policies if (figure := _lineage_figure(policy, data.revisions))
        ],
        "scores": _score_figure(scores) if scores else "",
        "canaries": [(release, _canary_figure(release)) for release in canaries[-MAX_CANARIES:]],
        "curves": [
            _training_figure(policy, list(curves))
            for policy, curves in groupby(data.curves, key=lambda curve: curve.policy)
        ],
    }


def _lineage_figure(policy: PolicyRow, revisions: tuple[RevisionRow, ...]) -> Markup:
    rows = [row for row in revisions if row.policy == policy.name]
    if not rows:
        return Markup("")
    words = f"Lineage of {policy.name}, newest first. {spoken(rows)}."
    count = f"{policy.revisions} revisions" if policy.revisions > 1 else "1 revision"
    return _figure(policy.name, words, lineage(rows, policy.champion), f"{count}, newest on top")


def _score_rows(data: ReportData) -> list[tuple[str, SuiteScore, str]]:
    rows = []
    states = {(item.policy, item.revision): item.state for item in data.releases}
    for policy in data.policies:
        if policy.base_score:
            rows.append((f"{policy.name}, base", policy.base_score, charts.BASELINE))
        for row in reversed([row for row in data.revisions if row.policy == policy.name and row.score]):
            assert row.score is not None
            state = states.get((row.policy, row.digest), ENDS.get(row.verdict, ""))
            label = served_name(row.policy, row.digest)
            label += f", {charts.STATE_WORDS[state]}" if state else ""
            rows.append((label, row.score, state or charts.REVISION))
    return rows


def _score_figure(rows: list[tuple[str, SuiteScore, str]]) -> Markup:
    words = "; ".join(
        f"{label}: {score.mean:.1%}, interval {score.ci_low:.1%} to {score.ci_high:.1%}"
        for label, score, _ in rows
    )
    suites = {score.suite: score.items for _, score, _ in rows}
    caption = ", ".join(f"{name}: {items} items" for name, items in sorted(suites.items()))
    return _figure("", f"Scores with intervals. {words}.", charts.score_intervals(rows), caption)


def _canary_figure(release: ReleaseResult) -> Markup:
    last = release.timeline[-1]
    word = charts.STATE_WORDS[release.state]
    after = f" after {release.canary_s:.1f} s" if release.canary_s is not None else ""
    caption = (
        f"{word}{after}: difference between {last.lower:+.2f} and {last.upper:+.2f}, "
        f"{last.canary_units} canary and {last.baseline_units} baseline users"
    )
    if release.weights:
        shares = ", ".join(f"{weight:.0%}" for _, weight in release.weights)
        caption += f"; share of users {shares}"
    title = served_name(release.policy, release.revision)
    return _figure(
        title, f"Canary of {title} over time. {caption}.", charts.canary_timeline(release), caption
    )


def _training_figure(policy: str, curves: list[Curve]) -> Markup:
    caption = training.spoken(curves)
    words = f"Learning curve of {policy}. {caption}."
    return _figure(policy, words, training.training_curves(curves), caption)


def _figure(title: str, words: str, plot: Markup, caption: str) -> Markup:
    heading = Markup("<h3>{}</h3>").format(title) if title else ""
    return Markup(
        '<figure>{}<div class="plot" role="img" aria-label="{}">{}</div><figcaption>{}</figcaption></figure>'
    ).format(heading, words, plot, caption)


def _interval(guard: GuardResult) -> str:
    """Return a guard's interval; a bound that nothing is known of is infinite."""
    sign, known = "" if guard.is_ratio else "+", math.isfinite(guard.upper)
    return f"{guard.lower:{sign}.3f} to {guard.upper:{sign}.3f}" if known else "not known yet"


def _score(score: SuiteScore | None) -> str:
    if score is None:
        return "–"
    bounds = f"[{score.ci_low:.1%}, {score.ci_high:.1%}]"
    return Markup('{}<br><span class="interval">{}</span>').format(f"{score.mean:.1%}", escape(bounds))


def _digest(digest: str | None, otherwise: str = "–") -> str:
    if not digest:
        return Markup('<span class="soft">{}</span>').format(otherwise)
    return Markup('<code title="{}">{}</code>').format(digest, digest[:DIGEST12])


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
