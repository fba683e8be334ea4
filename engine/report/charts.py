"""The report's plots of scores and canaries; `training.py` draws the learning curves."""

from collections.abc import Sequence

from markupsafe import Markup

from engine.report.data import CanaryPoint, ReleaseResult, SuiteScore
from engine.report.svg import Panel, Point, Scale, drawing, legend, steps

# Names of the page's CSS variables; each state of a release is one too.
BASELINE, REVISION = "baseline", "revision"
STATE_WORDS = {"promoted": "promoted", "rolled_back": "rolled back", "held": "held", "running": "running"}
WIDTH, LEFT, RIGHT = 500, 56, 490


def score_intervals(rows: Sequence[tuple[str, SuiteScore, str]]) -> Markup:
    """Draw scores with their 95% intervals, one row each; `rows` are (label, score, colour)."""
    room, row_height = 20 + 7.2 * max(len(label) for label, _, _ in rows), 36
    bottom = row_height * len(rows) + 8
    # The vertical axis has rows, not values.
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
    """Draw a canary: both arms' mean rewards, the difference's confidence sequence, the share of users."""
    points = release.timeline
    end = release.canary_s if release.state != "running" else None
    last = max(points[-1].seconds, end or 0, 1)
    x = Scale(0, last, LEFT, RIGHT)
    above, below, share = (
        Panel(x, Scale(0, 1, 160, 28)), Panel(x, Scale(-1, 1, 310, 200)), Panel(x, Scale(0, 1, 400, 340))
    )  # fmt: skip
    parts = [
        above.axes("", "mean reward", x_label=lambda _: ""),
        below.axes("", "canary − baseline", x_label=lambda _: "", y_label="{:+.1f}".format),
        share.axes("seconds since the canary's start", "share of users", y_ticks=3),
        legend((("canary", REVISION), ("baseline", BASELINE)), LEFT, 4),
        *_arms(above, points),
        *_bounds(below, points),
        below.across(0.0),
        below.across(-release.margin, "5 4"),
    ]
    if release.weights:
        until = end if end is not None else last
        parts.append(share.line(steps([*release.weights, (until, release.weights[-1][1])]), REVISION))
    if end is not None:
        parts += [panel.upright(end, release.state) for panel in (above, below, share)]
    return drawing(WIDTH, 440, parts)


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
