"""The HTML report: one file that opens offline, with every plot and style inside it.

Knows the page's order and how a figure becomes text for those who cannot see it. What to show comes
from `report_collect`, how a plot looks from `report_charts`, the page itself is `report.html`.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from engine.config import served_name
from engine.quality import report_charts as charts
from engine.quality.report_collect import collect
from engine.quality.report_data import Curve, ReleaseResult, ReportData, SuiteScore

__all__ = ["ReportData", "collect", "write_report"]

TEMPLATE = "report.html"


def write_report(data: ReportData, path: Path) -> Path:
    """Write the report to `path`, whole or not at all, and return the path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = _moment
    page = environment.get_template(TEMPLATE).render(
        data=data,
        plots=_plots(data),
        score=_score,
        words=charts.STATE_WORDS,
        colours={"baseline": charts.BASELINE, "revision": charts.REVISION},
        longest=max((seconds for _, seconds in data.stages), default=0) or 1,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(page, encoding="utf-8")
    draft.replace(path)
    return path


def _plots(data: ReportData) -> dict[str, Any]:
    scores = _score_rows(data)
    return {
        "scores": _score_figure(scores) if scores else "",
        "canaries": [_canary_figure(release) for release in data.releases if release.timeline],
        "curves": [_curve_figure(curve) for curve in data.curves if curve.steps],
    }


def _score_rows(data: ReportData) -> list[tuple[str, SuiteScore, str]]:
    rows = {}
    for release in data.releases:
        if release.base_score:
            label = f"{release.policy}, base"
            rows[label] = (label, release.base_score, charts.BASELINE)
        if release.score:
            label = f"{served_name(release.policy, release.revision)}, {charts.STATE_WORDS[release.state]}"
            rows[label] = (label, release.score, charts.STATE_COLOURS[release.state])
    return sorted(rows.values(), key=lambda row: row[1].policy)


def _score_figure(rows: list[tuple[str, SuiteScore, str]]) -> Markup:
    spoken = "; ".join(
        f"{label}: {score.mean:.1%}, interval {score.ci_low:.1%} to {score.ci_high:.1%}"
        for label, score, _ in rows
    )
    suites = {score.suite: score.items for _, score, _ in rows}
    caption = ", ".join(f"{name}: {items} items" for name, items in sorted(suites.items()))
    return _figure("", f"Scores with intervals. {spoken}.", [charts.score_intervals(rows)], caption)


def _canary_figure(release: ReleaseResult) -> Markup:
    last = release.timeline[-1]
    word = charts.STATE_WORDS[release.state]
    after = f" after {release.canary_s:.1f} s" if release.canary_s is not None else ""
    caption = (
        f"{word}{after}: difference between {last.lower:+.2f} and {last.upper:+.2f}, "
        f"{last.canary_units} canary and {last.baseline_units} baseline users"
    )
    title = served_name(release.policy, release.revision)
    spoken = f"Canary of {title} over time. {caption}."
    return _figure(title, spoken, [charts.canary_timeline(release)], caption)


def _curve_figure(curve: Curve) -> Markup:
    name = served_name(curve.policy, curve.digest) if curve.digest else curve.policy
    first, last = curve.steps[0], curve.steps[-1]
    caption = f"{len(curve.steps)} steps, mean reward {first.reward:.0%} to {last.reward:.0%}"
    ratios = [abs(step.importance_ratio - 1) for step in curve.steps if step.importance_ratio is not None]
    if ratios:
        caption += f", importance ratio 1 ± {max(ratios):.1e}"
    plots = [charts.learning_curve(curve)]
    if any(step.rollout_s is not None for step in curve.steps):
        plots.append(charts.step_seconds(curve))
    return _figure(name, f"Learning curve of {name}. {caption}.", plots, caption)


def _figure(title: str, spoken: str, plots: list[str], caption: str) -> Markup:
    heading = Markup("<h3>{}</h3>").format(title) if title else ""
    drawn = Markup("").join(Markup(plot) for plot in plots)
    return Markup(
        '<figure>{}<div class="plot" role="img" aria-label="{}">{}</div><figcaption>{}</figcaption></figure>'
    ).format(heading, spoken, drawn, caption)


def _score(score: SuiteScore | None) -> str:
    if score is None:
        return "–"
    bounds = f"[{score.ci_low:.1%}, {score.ci_high:.1%}]"
    return Markup('{}<br><span class="interval">{}</span>').format(f"{score.mean:.1%}", escape(bounds))


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
