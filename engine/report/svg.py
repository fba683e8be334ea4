"""Draws axes and marks of small plots as SVG.

Colours are names of the page's CSS variables, so a drawing follows its light or dark theme. All text is
escaped.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return a value's pixel, to a tenth."""
        share = (value - self.low) / ((self.high - self.low) or 1)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, count: int) -> list[float]:
        """Return at most `count` round values, evenly spaced."""
        if not count:
            return []
        span = (self.high - self.low) or 1
        power = 10 ** math.floor(math.log10(span / count))
        step = next(power * size for size in (1, 2, 5, 10, 20) if span / (power * size) < count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 10) for number in range(first, last + 1)]


@dataclass(frozen=True)
class Panel:
    """A rectangle of a drawing with a scale on each axis, in pixels."""

    x: Scale
    y: Scale

    def axes(
        self,
        x_title: str = "",
        y_title: str = "",
        x_label: Callable[[float], str] = "{:g}".format,
        y_label: Callable[[float], str] = "{:.0%}".format,
        y_ticks: int = 5,
    ) -> Markup:
        """Draw grid, tick labels and axis titles."""
        left, right, top, bottom = self.x.start, self.x.end, self.y.end, self.y.start
        parts = [
            Markup('<path d="M{} {}H{}" class="grid"/><text x="{}" y="{}" class="tick end">{}</text>').format(
                left, at, right, left - 7, at + 4, y_label(tick)
            )
            for tick in self.y.ticks(y_ticks)
            for at in [self.y(tick)]
        ]
        parts += [
            Markup('<path d="M{} {}V{}" class="grid"/><text x="{}" y="{}" class="tick mid">{}</text>').format(
                at, top, bottom, at, bottom + 16, x_label(tick)
            )
            for tick in self.x.ticks(8)
            for at in [self.x(tick)]
        ]
        middle = (top + bottom) / 2
        parts.append(
            Markup(
                '<text x="{}" y="{}" class="title mid">{}</text>'
                '<text transform="rotate(-90 12 {})" x="12" y="{}" class="title mid">{}</text>'
            ).format((left + right) / 2, bottom + 34, x_title, middle, middle, y_title)
        )
        return Markup("").join(parts)

    def line(self, points: Iterable[Point], colour: str, width: float = 2.2) -> Markup:
        """Draw a line through the points; `width` is in pixels."""
        path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        return Markup(
            '<path d="M{}" fill="none" style="stroke: var(--{})" stroke-width="{}" stroke-linejoin="round"/>'
        ).format(path, colour, width)

    def band(self, lower: Sequence[Point], upper: Sequence[Point], colour: str) -> Markup:
        """Fill the area between two lines."""
        path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in [*lower, *reversed(upper)])
        return Markup('<path d="M{}Z" style="fill: var(--{})" opacity="0.2"/>').format(path, colour)

    def dot(self, x: float, y: float, colour: str, radius: float, opacity: float = 1.0) -> Markup:
        """Draw a dot; `radius` is in pixels."""
        return Markup(
            '<circle cx="{}" cy="{}" r="{}" style="fill: var(--{})" opacity="{}"/>'
        ).format(self.x(x), self.y(y), radius, colour, opacity)  # fmt: skip

    def dots(self, points: Iterable[Point], colour: str, size: float, opacity: float = 1.0) -> Markup:
        """Draw many equal dots as one path, which is much smaller than hundreds of circles."""
        path = "".join(f"M{self.x(x)} {self.y(y)}h0" for x, y in points)
        return Markup(
            '<path d="{}" fill="none" style="stroke: var(--{})" stroke-width="{}" stroke-linecap="round" '
            'opacity="{}"/>'
        ).format(path, colour, size, opacity)

    def bars(self, bars: Iterable[tuple[float, float, float, float]], colour: str) -> Markup:
        """Draw vertical bars as one path; each is (left, right, low, high)."""
        path = "".join(
            f"M{self.x(left)} {self.y(low)}V{self.y(high)}H{self.x(right)}V{self.y(low)}Z"
            for left, right, low, high in bars
        )
        return Markup('<path d="{}" style="fill: var(--{})"/>').format(path, colour)

    def across(self, y: float, dash: str = "") -> Markup:
        """Draw a horizontal line across the panel at `y`."""
        return Markup('<path d="M{} {}H{}" class="level" stroke-dasharray="{}"/>').format(
            self.x.start, self.y(y), self.x.end, dash
        )

    def divide(self, x: float) -> Markup:
        """Draw a dashed vertical line between two parts at `x`."""
        return Markup('<path d="M{} {}V{}" class="level" stroke-dasharray="2 4"/>').format(
            self.x(x), self.y.start, self.y.end
        )

    def upright(self, x: float, colour: str) -> Markup:
        """Draw a vertical line across the panel at `x`."""
        return Markup('<path d="M{} {}V{}" style="stroke: var(--{})" stroke-width="2.5"/>').format(
            self.x(x), self.y.start, self.y.end, colour
        )


def steps(points: Sequence[Point]) -> list[Point]:
    """Return the corners of a step line, which keeps each value until the next."""
    corners = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


def legend(entries: Iterable[tuple[str, str]], left: float, top: float) -> Markup:
    """Draw a horizontal legend; `entries` are (word, colour)."""
    parts, x = [], left
    for word, colour in entries:
        parts.append(
            Markup(
                '<rect x="{}" y="{}" width="11" height="11" rx="2" style="fill: var(--{})"/>'
                '<text x="{}" y="{}" class="tick">{}</text>'
            ).format(x, top, colour, x + 16, top + 10, word)
        )
        x += 32 + 7 * len(word)
    return Markup("").join(parts)


def drawing(width: float, height: float, parts: Iterable[Markup]) -> Markup:
    """Return an SVG of `parts`; the page's style may shrink it below `width` pixels."""
    opening = Markup('<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}">').format(width, height)
    return Markup("").join([opening, *parts, Markup("</svg>")])
