"""Which rows go through the base together: within a token budget, with samples of one prompt together."""

from collections.abc import Sequence
from typing import Any, TypeVar

from engine.planning.memory import COPIES
from engine.training.model.packing import TokenRow

Piece = TypeVar("Piece")


def microbatches(
    rows: Sequence[TokenRow], budget: int, unit: int = 1, shared: bool = True
) -> list[list[int]]:
    """Return row indices in batches of at most `budget` stream tokens; a larger unit is a batch of its own.

    `unit` consecutive rows stay together. Rows with the same prompt stay together where they fit, so that
    they share it; without `shared` every row counts its own prompt. A prompt's keys are copied for each of
    its samples: a token of the budget allows for `COPIES` copies.
    """
    groups: dict[Any, list[list[int]]] = {}
    for begin in range(0, len(rows), unit):
        members = list(range(begin, min(begin + unit, len(rows))))
        groups.setdefault(rows[begin].shared if shared else begin, []).append(members)

    def size(units: Sequence[Sequence[int]]) -> int:
        chosen = [rows[i] for members in units for i in members]
        keys = sum(len(row.tokens) - 1 for row in chosen)
        if not shared:
            return keys
        prompts = _prompt_tokens(chosen)
        return max(stream_tokens(chosen), -(-(prompts + keys) // COPIES))

    pieces: list[list[list[int]]] = []
    for units in groups.values():
        pieces.append([])
        for members in units:
            if pieces[-1] and size([*pieces[-1], members]) > budget:
                pieces.append([])
            pieces[-1].append(members)
    sized = [(size(piece), [i for members in piece for i in members]) for piece in pieces]
    return [sorted(i for piece in batch for i in piece) for batch in first_fit(sized, budget)]


def stream_tokens(rows: Sequence[TokenRow]) -> int:
    """Return the number of stream tokens that `pack` makes of one part's rows."""
    return _prompt_tokens(rows) + sum(len(row.tokens) - 1 - row.start for row in rows)


def _prompt_tokens(rows: Sequence[TokenRow]) -> int:
    """Return the number of tokens of the distinct prompts of these rows."""
    return sum({row.shared: row.start for row in rows}.values())


def first_fit(pieces: Sequence[tuple[int, Piece]], budget: int) -> list[list[Piece]]:
    """Pack (size, piece) pairs into batches of at most `budget`, first-fit decreasing."""
    batches: list[list[Piece]] = []
    room: list[int] = []
    for size, piece in sorted(pieces, key=lambda sized: -sized[0]):
        at = next((at for at, left in enumerate(room) if size <= left), len(batches))
        if at == len(batches):
            batches.append([])
            room.append(budget)
        batches[at].append(piece)
        room[at] -= size
    return batches
