"""Validation of packed layouts: they come from a database, and their numbers decide what is copied.

Every number is checked before it is used as a size, an offset or an index. The work grows with the number of
blocks, not with the experts in them.
"""

import re
from collections.abc import Iterable
from itertools import pairwise

from engine.adapters.packed import Block, PackedLayout
from engine.errors import AdapterError
from engine.files import aligned

# Names that a message may repeat: short, without control characters.
NAME = re.compile(r"[\w.-]{1,300}", re.ASCII)
# Over the widths and the bytes of any adapter, yet a product of a few such numbers is computed at once.
LARGEST = 1 << 48


def check_layout(layout: PackedLayout) -> None:
    """Raise `AdapterError` unless the blocks are well formed, come in pairs, and tile the payload."""
    if not layout.blocks:
        raise AdapterError("its layout has no blocks, so it would serve the base itself.")
    end = 0
    for block in layout.blocks:
        _check_block(block)
        if block.offset != end:
            raise AdapterError(f"{_where(block)} begins at byte {block.offset}, not at {end}.")
        end += aligned(block.count * layout.dtype.itemsize)
    if layout.nbytes != end:
        raise AdapterError(f"its layout says {layout.nbytes} bytes, its blocks need {end}.")
    _check_pairs(layout.blocks)
    _check_apart([block for block in layout.blocks if block.side == "A"])


def _check_block(block: Block) -> None:
    if not isinstance(block.module, str) or not NAME.fullmatch(block.module):
        raise AdapterError(f"its layout has the module name {str(block.module)[:80]!r}, which no base has.")
    numbers = (*block.shape, *block.widths, block.first_slice, block.first_expert, block.offset)
    if not all(type(number) is int and 0 <= number <= LARGEST for number in numbers):
        raise AdapterError(f"its layout does not describe {block.module} by whole numbers of possible sizes.")
    if block.side not in ("A", "B") or not block.widths or not all((*block.shape, *block.widths)):
        raise AdapterError(f"its layout has a block of {block.module} without a side, widths or elements.")
    if block.shape != _expected_shape(block):
        raise AdapterError(f"{_where(block)} has the shape {block.shape[:6]}, which its widths contradict.")


def _expected_shape(block: Block) -> tuple[int, ...] | None:
    """Return the shape that a block of these widths must have by its experts, rank and inputs, or None."""
    if len(block.shape) == 4:
        last = block.shape[3] if block.side == "A" else block.widths[0]
        return (block.shape[0], block.slices, block.shape[2], last) if len(set(block.widths)) == 1 else None
    if block.side == "A":
        return (block.slices, *block.shape[1:]) if len(block.shape) == 3 else None
    return (block.shape[0], sum(block.widths)) if len(block.shape) == 2 else None


def _check_pairs(blocks: Iterable[Block]) -> None:
    """Refuse a factor that is repeated, or whose other half is missing or of another rank."""
    halves: dict[str, dict[tuple[object, ...], Block]] = {"A": {}, "B": {}}
    for block in blocks:
        first = block.first_slice, block.first_expert
        key: tuple[object, ...] = (block.module, *first, block.experts, block.widths, block.rank)
        if key in halves[block.side]:
            raise AdapterError(f"{_where(block)} is there twice.")
        halves[block.side][key] = block
    for key in halves["A"].keys() ^ halves["B"].keys():
        alone = halves["A"].get(key) or halves["B"][key]
        raise AdapterError(f"{_where(alone)} of rank {alone.rank} has no other half of its rank and widths.")


def _check_apart(blocks: Iterable[Block]) -> None:
    """Refuse two blocks for one slice of a module, or of one of its experts."""
    spans: dict[tuple[str, int], list[tuple[int, int, Block]]] = {}
    for block in blocks:
        # A linear module counts as one expert.
        experts = (block.first_expert, block.first_expert + max(block.experts, 1), block)
        for slot in range(block.first_slice, block.first_slice + block.slices):
            spans.setdefault((block.module, slot), []).append(experts)
    for block_spans in spans.values():
        block_spans.sort(key=lambda span: span[:2])
        for (_, end, _), (start, _, block) in pairwise(block_spans):
            if start < end:
                raise AdapterError(f"{_where(block)} overlaps another block of the same slice.")


def _where(block: Block) -> str:
    return f"{block.module}.lora_{block.side}"
