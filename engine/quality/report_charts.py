"""The plots of the report: learning curves, seconds of a step, scores with intervals, canaries.

Knows what each plot shows and in which colour; how a mark is drawn is `report_svg`'s.
"""

from collections.abc import Sequence
from statistics import fmean

from markupsafe import Markup

from engine.quality.report_data import CanaryPoint, Curve, ReleaseResult, SuiteScore
from engine.quality.report_svg import Panel, Point, Scale, drawing, legend, steps

# Names of the page's CSS variables.
BASELINE, REVISION, HANDOFF = "baseline", "revision", "held"
STATE_COLOURS = {"promoted": "promoted", "rolled_back": "rolled_back", "held": "held", "running": "running"}
STATE_WORDS = {"promoted": "promoted", "rolled_back": "rolled back", "held": "held", "running": "running"}
WIDTH, LEFT, RIGHT = 500, 56, 490
SMOOTHED = 5


def learning_curve(curve: Curve) -> Markup:
    """Draw reward by training step: each step as a dot, and the mean of five steps as a line."""
    panel = Panel(_steps_axis(curve), Scale(0, 1, 182, 10))
    points = [(float(step.step), step.reward) for step in curve.steps]
    dots = [panel.dot(x, y, REVISION, 3, 0.45) for x, y in points]
    line = panel.line(_smooth(points), REVISION)
    return drawing(WIDTH, 222, [panel.axes("training step", "mean reward"), *dots, line])


def step_seconds(curve: Curve) -> Markup:
    """Draw where each training step's seconds went, stacked."""
    parts = {"rollout": REVISION, "update": BASELINE, "handoff": HANDOFF}
    stacks = {
        step.step: [getattr(step, f"{part}_s") or 0.0 for part in parts]
        for step in curve.steps
        if step.rollout_s is not None
    }
    panel = Panel(_steps_axis(curve), Scale(0, max(map(sum, stacks.values())), 122, 28))
    bars = [
        panel.bar(float(step), 0.8, sum(seconds[:number]), sum(seconds[: number + 1]), colour)
        for step, seconds in stacks.items()
        for number, colour in enumerate(parts.values())
    ]
    axes = panel.axes("training step", "seconds", y_label="{:g}".format, y_ticks=4)
    return drawing(WIDTH, 162, [axes, *bars, legend(parts.items(), LEFT, 4)])


def score_intervals(rows: Sequence[tuple[str, SuiteScore, str]]) -> Markup:
    """Draw scores with their intervals, one row each; `rows` are (label, score, colour)."""
    room, row_height = 20 + 7.2 * max(len(label) for label, _, _ in rows), 36
    bottom = row_height * len(rows) + 8
    # The rows are the vertical axis; nothing is to be read off between them.
    panel = Panel(Scale(0, 1, room, room + 560), Scale(len(rows), 0, bottom, 8))
    parts = [panel.axes("share of unseen items solved", x_label="{:.0%}".format, y_ticks=0)]
    for number, (label, score, colour) in enumerate(rows):
        y = number + 0.6
        parts += [
            Markup('<text x="{}" y="{}" class="tick end">{}</text>').format(room - 12, panel.y(y) + 4, label),
            panel.line([(score.ci_low, y), (score.ci_high, y)], colour, 4),
            panel.dot(score.mean, y, colour, 5.5),
            Markup('<text x="{}" y="{}" class="value mid">{:.1%}</text>').format(
                panel.x(score.mean), panel.y(y) - 10, score.mean
            ),
        ]
    return drawing(room + 590, bottom + 42, parts)


def canary_timeline(release: ReleaseResult) -> Markup:
    """Draw both arms' mean reward over a difference's confidence sequence, with the verdict's moment."""
    points = release.timeline
    end = release.canary_s if release.state != "running" else None
    x = Scale(0, max(points[-1].seconds, end or 0, 1), LEFT, RIGHT)
    above, below = Panel(x, Scale(0, 1, 160, 28)), Panel(x, Scale(-1, 1, 310, 200))
    parts = [
        above.axes("", "mean reward", x_label=lambda _: ""),
        below.axes("seconds since the first canary user", "canary − baseline", y_label="{:+.1f}".format),
        legend((("canary", REVISION), ("baseline", BASELINE)), LEFT, 4),
        *_arms(above, points),
        *_bounds(below, points),
        below.across(0.0),
        below.across(-release.margin, "5 4"),
    ]
    if end is not None:
        parts += [panel.upright(end, STATE_COLOURS[release.state]) for panel in (above, below)]
    return drawing(WIDTH, 350, parts)


def _arms(panel: Panel, points: Sequence[CanaryPoint]) -> list[Markup]:
    arms: dict[str, list[Point]] = {
        BASELINE: [(it.seconds, it.baseline_reward) for it in points if it.baseline_reward is not None],
        REVISION: [(it.seconds, it.canary_reward) for it in points if it.canary_reward is not None],
    }
    return [panel.line(steps(arm), colour) for colour, arm in arms.items() if arm]


def _bounds(panel: Panel, points: Sequence[CanaryPoint]) -> list[Markup]:
    lower = steps([(it.seconds, it.lower) for it in points])
    upper = steps([(it.seconds, it.upper) for it in points])
    edges = [panel.line(edge, REVISION, 1.6) for edge in (lower, upper)]
    return [panel.band(lower, upper, REVISION), *edges]


def _smooth(points: Sequence[Point]) -> list[Point]:
    half = SMOOTHED // 2
    near = [points[max(0, number - half) : number + half + 1] for number in range(len(points))]
    return [(x, fmean(y for _, y in some)) for (x, _), some in zip(points, near, strict=True)]


def _steps_axis(curve: Curve) -> Scale:
    return Scale(curve.steps[0].step - 0.5, curve.steps[-1].step + 0.5, LEFT, RIGHT)
