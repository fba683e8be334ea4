"""Draws a policy's training sessions one after the other: reward above, diagnostics and seconds below.

Sessions that learn from answers as they are written have a loss in the reward's place.

A drawing has about `MAX_POINTS` points: neighbouring steps of one session are averaged.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from markupsafe import Markup

from engine.report.data import Curve
from engine.report.svg import Panel, Point, Scale, drawing, legend
from engine.settings.params import DIGEST12
from engine.training.service.train_step import TrainStep

WIDTH, LEFT, RIGHT = 500, 56, 490
MAX_POINTS, SMOOTHED = 150, 5
# The seconds' axis ends at this many medians; longer bars are cut.
LONGEST = 5
# More bars than this have no gaps between them.
CLOSE = 60
# Names of the page's CSS variables.
REWARD, ROLLOUT = "revision", "rolled_back"
PHASES = {"rollout wait": "revision", "reward": "promoted", "update": "baseline", "handoff": "held"}
# The least width of a session's curve with its digest above it, in pixels.
NAME_ROOM = 92


@dataclass(frozen=True)
class Bin:
    """Neighbouring steps of one session, drawn as one; `x` is their mean step, counted over the policy."""

    x: float
    steps: tuple[TrainStep, ...]

    def values(self, name: str) -> list[float]:
        """Return a metric's values of the steps that have it."""
        return [value for step in self.steps if (value := getattr(step, name)) is not None]


Lines = Sequence[Sequence[Bin]]


@dataclass(frozen=True)
class Strip:
    """A low panel of a metric's mean minus `less`, with the band of its `extremes` if it has any."""

    title: str
    name: str
    extremes: tuple[str, str] = ("", "")
    less: float = 0.0

    def means(self, line: Sequence[Bin]) -> list[Point]:
        """Return the metric's mean in each bin that has it."""
        return self._points(line, self.name, fmean)

    def band(self, line: Sequence[Bin]) -> tuple[list[Point], list[Point]]:
        """Return the lowest and the highest values of each bin; both empty without extremes."""
        lowest, highest = self.extremes
        return (self._points(line, lowest, min), self._points(line, highest, max)) if lowest else ([], [])

    def _points(
        self, line: Sequence[Bin], name: str, choose: Callable[[Iterable[float]], float]
    ) -> list[Point]:
        return [(bin.x, choose(values) - self.less) for bin in line if (values := bin.values(name))]


STRIPS = (
    Strip("importance ratio − 1", "importance_ratio", ("ratio_min", "ratio_max"), 1.0),
    Strip("held-out loss, nats", "held_out_loss"),
    Strip("KL to the base, nats", "kl"),
    Strip("entropy of a token, nats", "entropy"),
)


def training_curves(curves: Sequence[Curve]) -> Markup:
    """Draw all sessions of one policy: reward and spread or loss, importance ratio, KL, entropy, seconds."""
    starts = [0, *accumulate(curve.steps[-1].step for curve in curves)]
    stride = max(1, -(-starts[-1] // MAX_POINTS))
    lines = [binned(curve, start, stride) for curve, start in zip(curves, starts, strict=False)]
    x = Scale(curves[0].steps[0].step - 0.5, starts[-1] + 0.5, LEFT, RIGHT)
    losses = [bin for line in lines for bin in line if not bin.values("reward")]
    has_rewards = len(losses) < sum(map(len, lines))
    name, most = ("reward", 1.0) if has_rewards else ("loss", max(max(bin.values("loss")) for bin in losses))
    above = Panel(x, Scale(0, most, 150, 22))
    label = "{:.0%}".format if has_rewards else _short
    parts = [above.axes("", f"mean {name}", _nothing, label), *_names(above, curves, starts)]
    parts += [part for line in lines for part in _curve(above, line, name)]
    panels, bottom = [above], 150
    for strip in STRIPS:
        if any(map(strip.means, lines)):
            panel = _strip_panel(strip, x, bottom + 26, lines)
            parts += _strip(strip, panel, lines)
            panels.append(panel)
            bottom += 66
    reach = _reach([_seconds(bin) for line in lines for bin in line])
    below = Panel(x, Scale(0, reach, bottom + 116, bottom + 34))
    parts += _phases(below, lines, bottom + 10)
    ends = [start + 0.5 for start in starts[1:-1]]
    parts += [panel.divide(end) for panel in (*panels, below) for end in ends]
    return drawing(WIDTH, bottom + 156, parts)


def binned(curve: Curve, start: int, stride: int) -> list[Bin]:
    """Return a session's steps in bins of `stride`; `start` steps of the policy came before."""
    parts = [curve.steps[at : at + stride] for at in range(0, len(curve.steps), stride)]
    return [Bin(start + fmean(step.step for step in part), part) for part in parts]


def spoken(curves: Sequence[Curve]) -> str:
    """Return a summary of a policy's training in words."""
    steps = [step for curve in curves for step in curve.steps]
    last, several = curves[-1].steps, len(curves) > 1
    words = ["1 step" if len(steps) == 1 else f"{len(steps)} steps"]
    words[0] += f" in {len(curves)} lines" if several else ""
    learned = f"loss {last[0].loss or 0:.3f} to {last[-1].loss or 0:.3f}"
    if last[0].reward is not None:
        learned = f"mean reward {last[0].reward:.0%} to {last[-1].reward:.0%}"
    words.append(learned + (" in the last" if several else ""))
    if ratios := [abs(step.importance_ratio - 1) for step in steps if step.importance_ratio is not None]:
        words.append(f"importance ratio 1 ± {max(ratios):.1e}")
    if stale := max(step.staleness or 0.0 for step in steps):
        words.append(f"staleness up to {stale:g}")
    seconds = [sum(step.phases.values()) for step in steps]
    if any(seconds):
        longest = f", the longest {max(seconds):.2g} s" if max(seconds) > _reach(seconds) else ""
        words.append(f"{fmean(seconds):.2g} s a step{longest}")
    if waited := sum(step.backpressure_s or 0.0 for step in steps):
        words.append(f"{waited:.2g} s of back-pressure")
    return ", ".join([*words, *_masked(steps)])


def _masked(steps: Sequence[TrainStep]) -> list[str]:
    counts: Counter[str] = Counter()
    for step in steps:
        counts.update(step.masked)
    if not counts.total():
        return []
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.items() if count)
    return [f"{counts.total():,} of {sum(step.tokens or 0 for step in steps):,} tokens masked ({reasons})"]


def _names(panel: Panel, curves: Sequence[Curve], starts: Sequence[int]) -> list[Markup]:
    """Write each session's digest above its curve, where it has one and there is room."""
    named = []
    for curve, start in zip(curves, starts, strict=False):
        left, right = max(panel.x(start + 0.5), LEFT), panel.x(start + curve.steps[-1].step)
        if curve.digest and right - left >= NAME_ROOM:
            name = curve.digest[:DIGEST12]
            named.append(Markup('<text x="{}" y="14" class="tick digest">{}</text>').format(left + 4, name))
    return named


def _curve(panel: Panel, line: Sequence[Bin], name: str) -> list[Markup]:
    """Draw a session's rewards or losses: dots, their moving mean, and the spread of rewards around it."""
    dots = [(bin.x, fmean(values)) for bin in line if (values := bin.values(name))]
    if not dots:
        return []
    spread = [(bin.x, fmean(values)) for bin in line if (values := bin.values("reward_std"))]
    means = _smooth(dots)
    parts = [panel.dots(dots, REWARD, 5, 0.4), panel.line(means, REWARD)]
    if len(spread) < len(line):
        return parts
    sides = [(x, mean, std) for (x, mean), (_, std) in zip(means, _smooth(spread), strict=True)]
    lower = [(x, max(0.0, mean - std)) for x, mean, std in sides]
    upper = [(x, min(1.0, mean + std)) for x, mean, std in sides]
    return [panel.band(lower, upper, REWARD), *parts]


def _strip_panel(strip: Strip, x: Scale, top: float, lines: Lines) -> Panel:
    points = [point for line in lines for part in (strip.means(line), *strip.band(line)) for point in part]
    values = [value for _, value in points]
    room = (max(values) - min(values) or abs(max(values)) or 1.0) * 0.08
    return Panel(x, Scale(min(values) - room, max(values) + room, top + 40, top))


def _strip(strip: Strip, panel: Panel, lines: Lines) -> list[Markup]:
    title = Markup('<text x="{}" y="{}" class="title">{}</text>').format(LEFT, panel.y.end - 8, strip.title)
    parts = [title, panel.axes(x_label=_nothing, y_label=_short, y_ticks=3)]
    for line in lines:
        means, (lower, upper) = strip.means(line), strip.band(line)
        parts += [panel.band(lower, upper, REWARD)] if lower and upper else []
        parts += [panel.line(means, REWARD, 1.6)] if means else []
    return parts


def _phases(panel: Panel, lines: Lines, top: float) -> list[Markup]:
    """Draw the steps' seconds as bars, stacked by phase."""
    bins, reach = [bin for line in lines for bin in line], panel.y.high
    parts = [panel.axes("training step", "seconds", y_label=_short, y_ticks=4)]
    bottoms, half = [0.0] * len(bins), 0.4 if len(bins) <= CLOSE else 0.5
    for phase, colour in PHASES.items():
        spent = [fmean(step.phases[phase] for step in bin.steps) for bin in bins]
        tops = [low + seconds for low, seconds in zip(bottoms, spent, strict=True)]
        bars = [
            (bin.x - half * len(bin.steps), bin.x + half * len(bin.steps), min(low, reach), min(high, reach))
            for bin, low, high in zip(bins, bottoms, tops, strict=True)
        ]
        parts.append(panel.bars(bars, colour))
        bottoms = tops
    spans = [[(x, min(y, reach)) for x, y in _overlapped(line)] for line in lines]
    parts += [panel.line(span, ROLLOUT, 1.6) for span in spans if span]
    named = [*PHASES.items(), *([("rollout", ROLLOUT)] if any(spans) else [])]
    return [*parts, legend(named, LEFT, top)]


def _overlapped(line: Sequence[Bin]) -> list[Point]:
    """Return the rollouts' seconds if training overlapped with them, else nothing."""
    steps = [step for bin in line for step in bin.steps]
    if not any((step.rollout_s or 0.0) > step.phases["rollout wait"] for step in steps):
        return []
    return [(bin.x, fmean(values)) for bin in line if (values := bin.values("rollout_s"))]


def _reach(seconds: Sequence[float]) -> float:
    """Return the end of the seconds' axis: one slow step, often the first, must not flatten the others."""
    return min(max(seconds), LONGEST * median(seconds)) or max(seconds)


def _seconds(bin: Bin) -> float:
    """Return a step's seconds, or those of its rollouts where they overlapped and took longer."""
    spent = fmean(sum(step.phases.values()) for step in bin.steps)
    rollouts = bin.values("rollout_s")
    return max(spent, fmean(rollouts) if rollouts else 0.0)


def _smooth(points: Sequence[Point]) -> list[Point]:
    half = SMOOTHED // 2
    near = [points[max(0, number - half) : number + half + 1] for number in range(len(points))]
    return [(x, fmean(y for _, y in some)) for (x, _), some in zip(points, near, strict=True)]


def _nothing(_: float) -> str:
    return ""


def _short(value: float) -> str:
    return f"{value:.4g}"
