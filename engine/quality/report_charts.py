"""The plots of the report, each as an SVG that reads on light and on dark paper.

Knows colours and axes. Text and grid take the page's own colour (`currentColor`), so one picture serves
both themes. Nothing is loaded from anywhere: Vega runs inside `vl_convert`. A plot of the same values is
drawn once, so that a page which is looked at again and again costs what has changed.
"""

from functools import lru_cache
from typing import Any

import altair as alt
import vl_convert

from engine.quality.report_data import Curve, ReleaseResult, SuiteScore

BASELINE, REVISION, GOOD, BAD, HELD = "#8a94a6", "#3d7fd9", "#2f9e68", "#d8574b", "#c98a1b"
STATE_COLOURS = {"promoted": GOOD, "rolled_back": BAD, "held": HELD, "running": REVISION}
STATE_WORDS = {"promoted": "promoted", "rolled_back": "rolled back", "held": "held", "running": "running"}
WIDTH = 430
CACHED = 256
PERCENT = alt.Axis(format="%", tickCount=5)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"


@lru_cache(CACHED)
def learning_curve(curve: Curve) -> str:
    """Draw reward by training step: each step as a dot, and the mean of five steps as a line."""
    rows = [{"step": step.step, "reward": step.reward} for step in curve.steps]
    chart = alt.Chart(alt.Data(values=rows)).encode(x=alt.X("step:Q", title="training step"))
    dots = chart.mark_circle(size=22, opacity=0.45, color=REVISION).encode(
        y=_share("reward:Q", "mean reward")
    )
    line = (
        chart.transform_window(smooth="mean(reward)", frame=[-2, 2])
        .mark_line(color=REVISION, strokeWidth=2.2)
        .encode(y="smooth:Q")
    )
    return _svg((dots + line).properties(width=WIDTH, height=190))


@lru_cache(CACHED)
def step_seconds(curve: Curve) -> str:
    """Draw where each training step's seconds went, stacked."""
    parts = {"rollout": "rollout_s", "update": "update_s", "handoff": "handoff_s"}
    rows = [
        {"step": step.step, "part": part, "seconds": getattr(step, name), "order": order}
        for step in curve.steps
        for order, (part, name) in enumerate(parts.items())
        if getattr(step, name) is not None
    ]
    colours = alt.Scale(domain=list(parts), range=[REVISION, BASELINE, HELD])
    bars = alt.Chart(alt.Data(values=rows)).mark_bar(width={"band": 0.8})
    chart = bars.encode(
        x=alt.X("step:O", title="training step", axis=alt.Axis(values=_ticks(curve), labelAngle=0)),
        y=alt.Y("seconds:Q", title="seconds", axis=alt.Axis(tickCount=4)),
        color=alt.Color("part:N", title=None, scale=colours),
        order="order:Q",
    )
    return _svg(chart.properties(width=WIDTH, height=110))


@lru_cache(CACHED)
def score_intervals(rows: tuple[tuple[str, SuiteScore, str], ...]) -> str:
    """Draw scores with their intervals, one row each; `rows` are (label, score, colour)."""
    values = [
        {"label": label, "mean": score.mean, "low": score.ci_low, "high": score.ci_high, "colour": colour,
         "text": f"{score.mean:.1%}"}
        for label, score, colour in rows
    ]  # fmt: skip
    # The page's font is not known here, so room for the labels is given, not measured.
    room = 8 * max(len(label) for label, _, _ in rows)
    labels = alt.Axis(
        grid=False, domain=False, ticks=False, labelLimit=room, minExtent=room, labelFontSize=12
    )
    chart = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("label:N", title=None, sort=None, axis=labels),
        color=alt.Color("colour:N", scale=None),
    )
    rule = chart.mark_rule(strokeWidth=3, opacity=0.55).encode(
        x=alt.X("low:Q", title="share of unseen items solved", axis=PERCENT, scale=alt.Scale(domain=[0, 1])),
        x2="high:Q",
    )
    dots = chart.mark_circle(size=95, opacity=1).encode(x="mean:Q")
    text = chart.mark_text(dy=-12, fontSize=11, font=FONT, fontWeight="bold").encode(
        x="mean:Q", text="text:N"
    )
    return _svg((rule + dots + text).properties(width=600, height=alt.Step(38)))


@lru_cache(CACHED)
def canary_timeline(release: ReleaseResult) -> str:
    """Draw both arms' mean reward over a difference's confidence sequence, with the verdict's moment."""
    end = release.canary_s if release.state != "running" else None
    domain = [0, max(release.timeline[-1].seconds, end or 0, 1)]
    x = alt.X(
        "seconds:Q", title="seconds since the first canary user", scale=alt.Scale(domain=domain, nice=False)
    )
    panels: list[Any] = [_arms(release, x), _bounds(release, x)]
    if end is not None:
        panels = [panel + _mark(end, STATE_COLOURS[release.state]) for panel in panels]
    top, bottom = panels
    return _svg(
        alt.vconcat(
            top.properties(width=WIDTH, height=140), bottom.properties(width=WIDTH, height=120), spacing=14
        )
    )


def _arms(release: ReleaseResult, x: alt.X) -> alt.Chart:
    rows = [
        {"seconds": point.seconds, "arm": arm, "reward": reward}
        for point in release.timeline
        for arm, reward in (("canary", point.canary_reward), ("baseline", point.baseline_reward))
        if reward is not None
    ]
    colours = alt.Scale(domain=["canary", "baseline"], range=[REVISION, BASELINE])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(interpolate="step-after", strokeWidth=2.2)
        .encode(
            x=x.copy().title(None),
            y=_share("reward:Q", "mean reward"),
            color=alt.Color("arm:N", title=None, scale=colours),
        )
    )


def _bounds(release: ReleaseResult, x: alt.X) -> Any:
    rows = [{"seconds": point.seconds, "low": point.lower, "high": point.upper} for point in release.timeline]
    y = alt.Y(
        "low:Q",
        title="canary − baseline",
        scale=alt.Scale(domain=[-1, 1]),
        axis=alt.Axis(format="+.1f", tickCount=5),
    )
    chart = alt.Chart(alt.Data(values=rows)).encode(x=x)
    band = chart.mark_area(interpolate="step-after", opacity=0.22, color=REVISION).encode(y=y, y2="high:Q")
    edges = [
        chart.mark_line(interpolate="step-after", strokeWidth=1.6, color=REVISION).encode(y=f"{side}:Q")
        for side in ("low", "high")
    ]
    lines = [(0.0, [1, 0]), (-release.margin, [4, 3])]
    rules = [
        alt.Chart(alt.Data(values=[{"at": at}]))
        .mark_rule(color="currentColor", opacity=0.5, strokeDash=dash)
        .encode(y="at:Q")
        for at, dash in lines
    ]
    return alt.layer(band, *rules, *edges)


def _mark(seconds: float, colour: str) -> alt.Chart:
    data = alt.Data(values=[{"seconds": seconds}])
    return alt.Chart(data).mark_rule(color=colour, strokeWidth=2.5).encode(x="seconds:Q")


def _ticks(curve: Curve) -> list[int]:
    steps = [step.step for step in curve.steps]
    stride = max(1, len(steps) // 8)
    return steps[stride - 1 :: stride]


def _share(field: str, title: str) -> alt.Y:
    return alt.Y(field, title=title, axis=PERCENT, scale=alt.Scale(domain=[0, 1]))


def _svg(chart: Any) -> str:
    text = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFont": FONT, "titleFont": FONT}
    axis = text | {
        "gridColor": "currentColor", "gridOpacity": 0.12, "tickColor": "currentColor", "tickOpacity": 0.3,
        "domainColor": "currentColor", "domainOpacity": 0.4, "titleFontWeight": "normal",
        "titleOpacity": 0.75, "labelOpacity": 0.85, "labelFontSize": 11, "titleFontSize": 11.5,
    }  # fmt: skip
    legend = text | {"orient": "top", "labelFontSize": 11.5, "symbolStrokeWidth": 3, "offset": 4}
    styled = chart.configure(
        background="transparent", view={"stroke": None}, axis=axis, legend=legend, padding=4
    )
    return str(vl_convert.vegalite_to_svg(styled.to_dict()))
