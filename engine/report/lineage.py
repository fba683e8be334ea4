"""Draws the lineage of a policy's revisions as SVG: newest on top, a line from each down to its parent.

The champion's ancestors are the leftmost lane. Colours are the page's CSS variables, so the drawing follows
its light or dark theme.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from engine.report.data import RevisionRow
from engine.report.svg import drawing
from engine.settings.params import DIGEST12

ROW, LANE, LEFT, RADIUS = 34, 22, 16, 6
BASE = "base"
COLOURS = {
    "champion": "promoted", "canary": "running", "previous": "soft", "buried": "rolled_back", "": "soft",
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One revision of the drawing: `lane` counts from the left, `parent` is the parent's row."""

    digest: str
    lane: int
    row: int
    parent: int


def arrange(rows: Sequence[RevisionRow], champion: str | None) -> list[Node]:
    """Assign each revision a lane; `rows` are newest first. A parent that is not shown is the last row.

    A lane is occupied from a revision down to its parent, so that no line crosses another's dot.
    """
    places = {row.digest: number for number, row in enumerate(rows)}
    awaited: list[str | None] = [champion if champion in places else None]
    nodes = []
    for number, row in enumerate(rows):
        if row.digest in awaited:
            lane = awaited.index(row.digest)
        else:
            awaited.append(None)
            lane = awaited.index(None)
        # A parent is further down, or not shown.
        parent = places.get(row.parent or BASE, -1)
        target = row.parent if parent > number else BASE
        awaited = [None if digest == row.digest else digest for digest in awaited]
        awaited[lane] = target
        nodes.append(Node(row.digest, lane, number, parent if parent > number else len(rows)))
    return nodes


def lineage(rows: Sequence[RevisionRow], champion: str | None) -> Markup:
    """Draw a policy's revisions, each dot with digest, score and role."""
    nodes = arrange(rows, champion)
    lanes = {node.row: node.lane for node in nodes} | {len(rows): 0}
    text = LEFT * 2 + max(lanes.values()) * LANE
    beyond = any(row.parent and nodes[number].parent == len(rows) for number, row in enumerate(rows))
    drawn = [_line(node, lanes[node.parent], solid=not rows[node.row].parent) for node in nodes
             if node.parent == len(rows)]  # fmt: skip
    drawn += [_line(node, lanes[node.parent], solid=True) for node in nodes if node.parent < len(rows)]
    drawn += [_dot(row, node, text) for row, node in zip(rows, nodes, strict=True)]
    drawn.append(_base(len(rows), text, "base, and older revisions" if beyond else BASE))
    return drawing(text + 330, (len(rows) + 1) * ROW, drawn)


def spoken(rows: Sequence[RevisionRow]) -> str:
    """Return the lineage in words, for screen readers."""
    return "; ".join(
        f"{row.digest[:DIGEST12]} from {row.parent[:DIGEST12] if row.parent else BASE}"
        + (f", {row.role}" if row.role else "")
        for row in rows
    )


def _place(lane: int, row: int) -> tuple[int, int]:
    return LEFT + lane * LANE, row * ROW + ROW // 2


def _line(node: Node, parent_lane: int, solid: bool) -> Markup:
    x, y = _place(node.lane, node.row)
    to_x, to_y = _place(parent_lane, node.parent)
    bend = to_y - ROW
    return Markup(
        '<path d="M{x} {y}V{bend}C{x} {to_y} {to_x} {bend} {to_x} {to_y}" class="edge{dashed}"/>'
    ).format(x=x, y=y, bend=bend, to_x=to_x, to_y=to_y, dashed="" if solid else " beyond")


def _dot(row: RevisionRow, node: Node, text: int) -> Markup:
    x, y = _place(node.lane, node.row)
    score = f"{row.score.mean:.1%}" if row.score else ""
    return Markup(
        '<circle cx="{x}" cy="{y}" r="{radius}" class="dot {role}" style="--dot: var(--{colour})"/>'
        '<text x="{text}" y="{base}"><tspan class="digest">{digest}</tspan>'
        '<tspan dx="14" class="score">{score}</tspan>'
        '<tspan dx="14" style="fill: var(--{colour})">{role}</tspan></text>'
    ).format(
        x=x,
        y=y,
        radius=RADIUS,
        role=row.role or "plain",
        colour=COLOURS[row.role],
        text=text,
        base=y + 4,
        digest=row.digest[:DIGEST12],
        score=score,
    )


def _base(row: int, text: int, words: str) -> Markup:
    x, y = _place(0, row)
    return Markup(
        '<rect x="{x}" y="{y}" width="10" height="10" rx="2" class="dot base"/>'
        '<text x="{text}" y="{base}" class="soft">{words}</text>'
    ).format(x=x - 5, y=y - 5, text=text, base=y + 4, words=words)
