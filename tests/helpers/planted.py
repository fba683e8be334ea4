"""Malformed packed adapters, put straight into catalog and store behind the importer's back.

`PLANTED` maps a name to (what changes a good one, the words that the engine's refusal must say). A change
gets a `Plant` and edits it: the layout as parsed JSON, the bytes, the row. The adapter is one of a dense
base: its first block is A of `model.layers.0.mlp.down_proj`, the second one B of it.
"""

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.adapters import packed
from engine.base.families import BaseShapes
from engine.catalog.catalog import Policy, Revision
from engine.catalog.records import served_name
from tests.helpers.live import RunningEngine

MODULE, SIDE, FIRST, WIDTHS, SHAPE, OFFSET = range(6)
DOWN = "model.layers.0.mlp.down_proj"


@dataclass
class Plant:
    """A packed adapter as it will lie in catalog and store; `row` are changes of the catalog's row."""

    layout: dict[str, Any]
    payload: bytearray
    engine: RunningEngine
    row: dict[str, Any] = field(default_factory=dict)
    layout_text: str | None = None

    @property
    def blocks(self) -> list[Any]:
        return self.layout["blocks"]

    def floats(self, values: dict[int, float]) -> None:
        """Set elements of the first block, by their number."""
        for number, value in values.items():
            struct.pack_into("<f", self.payload, self.blocks[0][OFFSET] + 4 * number, value)


def plant(engine: RunningEngine, tensors: dict[str, torch.Tensor], change: Callable[[Plant], None]) -> str:
    """Publish a changed adapter, its checksum right unless the change says otherwise; return its name."""
    shapes = BaseShapes.read(engine.base_path)
    whole = packed.pack(tensors, torch.float32, shapes.fused)
    made = Plant(json.loads(whole.layout.to_json()), bytearray(whole.tobytes()), engine)
    change(made)
    text = made.layout_text if made.layout_text is not None else json.dumps(made.layout)
    layout = hashlib.sha256(text.encode()).hexdigest()
    at = engine.store.append(bytes(made.payload))
    digest = hashlib.sha256(os.urandom(16)).hexdigest()
    row = Revision(
        "planted", digest, engine.base_digest, None, 0, 8, at.length, layout, at.segment, at.offset,
        at.length, at.checksum, "exported", "test", time.time(),
    )  # fmt: skip
    engine.catalog.policies.add(Policy("planted", engine.base_digest, {}, "test", time.time()))
    engine.catalog.layouts.add(layout, text)
    engine.catalog.revisions.add_many([replace(row, **{"layout": layout, **made.row})])
    return served_name("planted", digest)


PLANTED: dict[str, tuple[Callable[[Plant], None], str]] = {}


def case(name: str, words: str) -> Callable[[Callable[[Plant], None]], Callable[[Plant], None]]:
    def add(change: Callable[[Plant], None]) -> Callable[[Plant], None]:
        PLANTED[name] = (change, words)
        return change

    return add


def block(number: int, at: int, value: Any) -> Callable[[Plant], None]:
    """Return a change of one field of a block."""

    def change(made: Plant) -> None:
        made.blocks[number][at] = value

    return change


def text(value: str) -> Callable[[Plant], None]:
    def change(made: Plant) -> None:
        made.layout_text = value

    return change


def said(**values: Any) -> Callable[[Plant], None]:
    return lambda made: made.layout.update(values)


def row(**values: Any) -> Callable[[Plant], None]:
    return lambda made: made.row.update(values)


NOT_OURS, NO_NUMBERS = "is malformed", "whole numbers"
PLANTED |= {
    # What the layout says of itself
    "layout is no JSON": (text("{"), NOT_OURS),
    "layout is empty": (text(""), NOT_OURS),
    "layout is a list": (text("[]"), NOT_OURS),
    "layout of brackets": (text("[" * 100_000), NOT_OURS),
    "layout without blocks": (said(blocks=[]), "no blocks"),
    "layout with blocks of numbers": (said(blocks=[1, 2]), NOT_OURS),
    "layout with short blocks": (said(blocks=[["a", "A"]]), NOT_OURS),
    "layout of the future": (said(v=99), "format version 99"),
    "layout without a version": (lambda made: made.layout.pop("v"), NOT_OURS),
    "layout of a version that is a page": (said(v="9" * 10_000), "format version 999"),
    "layout of an unknown dtype": (said(dtype="F8"), NOT_OURS),
    "layout of a dtype that is a list": (said(dtype=["F32"]), NOT_OURS),
    "layout of another dtype": (said(dtype="BF16"), "begins at byte"),
    "layout says more bytes": (lambda made: said(bytes=made.layout["bytes"] + 64)(made), "its blocks need"),
    "layout says fewer bytes": (lambda made: said(bytes=made.layout["bytes"] - 64)(made), "its blocks need"),
    "layout says no bytes": (said(bytes=None), "its blocks need"),
    # Names
    "a module that no base has": (block(0, MODULE, "model.layers.99.mlp.down_proj"), "has no other half"),
    "both halves of a module that no base has": (
        lambda made: [change(made) for change in (block(0, MODULE, "a.b"), block(1, MODULE, "a.b"))],
        "the base has no module a.b",
    ),
    "a module's name that clears screens": (block(0, MODULE, "\x1b[2J"), "which no base has"),
    "a module's name of a page": (block(0, MODULE, "a" * 10_000), "which no base has"),
    "a module's name that is a number": (block(0, MODULE, 7), "which no base has"),
    "an unfused name": (
        lambda made: [
            entry.__setitem__(MODULE, entry[MODULE].replace("qkv_proj", "q_proj")) for entry in made.blocks
        ],
        "the base has no module",
    ),
    # Numbers
    "a side that is none": (block(0, SIDE, "C"), "without a side"),
    "two A and no B": (block(1, SIDE, "A"), "which its widths contradict"),
    "a negative offset": (block(1, OFFSET, -64), NO_NUMBERS),
    "a huge offset": (block(1, OFFSET, 1 << 62), NO_NUMBERS),
    "an offset of 400 digits": (block(1, OFFSET, 10**400), NO_NUMBERS),
    "an offset that is a word": (block(1, OFFSET, "64"), NO_NUMBERS),
    "an offset of a half": (block(1, OFFSET, 64.5), NO_NUMBERS),
    "an offset beyond the bytes": (block(1, OFFSET, 1 << 30), "begins at byte"),
    "blocks over one another": (block(1, OFFSET, 0), "begins at byte"),
    "a hole between blocks": (
        lambda made: block(1, OFFSET, made.blocks[1][OFFSET] + 64)(made), "begins at byte"
    ),
    "a negative rank": (lambda made: block(0, SHAPE, [1, -8, made.blocks[0][SHAPE][2]])(made), NO_NUMBERS),
    "a rank of 0": (lambda made: block(0, SHAPE, [1, 0, made.blocks[0][SHAPE][2]])(made), "without a side"),
    "a shape without axes": (block(0, SHAPE, []), "which its widths contradict"),
    "a shape that is a number": (block(0, SHAPE, 8), NOT_OURS),
    "a shape that is true": (block(0, SHAPE, [True, 8, 384]), NO_NUMBERS),
    "experts on a dense base": (lambda made: experts(made), "without experts"),
    "widths that are none": (block(0, WIDTHS, []), "without a side"),
    "widths of another module": (block(0, WIDTHS, [129]), "has no other half"),
    "a slice that the module lacks": (
        lambda made: [change(made) for change in (block(0, FIRST, 1), block(1, FIRST, 1))], "expected outputs"
    ),
    "a giant slice": (
        lambda made: [change(made) for change in (block(0, FIRST, 1 << 40), block(1, FIRST, 1 << 40))],
        "expected outputs",
    ),
    "a block twice": (lambda made: twice(made), "is there twice"),
    "slices over one another": (lambda made: overlapping(made), "overlaps another block"),
    "a half missing": (lambda made: halved(made), "has no other half"),
    "halves of other ranks": (lambda made: unequal(made), "has no other half"),
    "transposed": (lambda made: transposed(made), "inputs, found"),
    "wrong rank": (lambda made: ranked(made), "over the engine's maximum"),
    # Bytes
    "NaN": (lambda made: made.floats({5: float("nan")}), f"{DOWN}.lora_A holds NaN"),
    "Inf": (lambda made: made.floats({5: float("inf")}), f"{DOWN}.lora_A holds NaN"),
    "truncated": (lambda made: made.payload.__delitem__(slice(-64, None)), "bytes, found"),
    "a tail": (lambda made: made.payload.extend(b"\0" * 64), "bytes, found"),
    "0 bytes": (lambda made: made.payload.clear(), "bytes, found 0"),
    "wrong checksum": (row(checksum="0" * 64), "damaged"),
    "a checksum of another kind": (row(checksum="ab" * 20), "damaged"),
    "a length of another kind": (row(length=1 << 40), "bytes, found"),
    "a negative length": (row(length=-1), "bytes, found"),
    "a negative start": (row(offset=-4096), "are not in"),
    "a start beyond the file": (row(offset=1 << 50), "are not in"),
    "a start in the middle of an element": (row(offset=1), "are not in"),
    "a segment that is missing": (row(segment="nothing.seg"), "missing or not a regular file"),
    "a layout that is missing": (row(layout="f" * 64), "There is no layout"),
}  # fmt: skip


def experts(made: Plant) -> None:
    """Say that the first module has one expert; the bytes stay."""
    (_, rank, inputs), width = made.blocks[0][SHAPE], made.blocks[0][WIDTHS][0]
    made.blocks[0][SHAPE], made.blocks[1][SHAPE] = [1, 1, rank, inputs], [1, 1, rank, width]


def twice(made: Plant) -> None:
    """Repeat the first two blocks at the end, bytes and all."""
    end = made.layout["bytes"]
    size = made.blocks[2][OFFSET]
    for number in (0, 1):
        made.blocks.append([*made.blocks[number][:OFFSET], end + made.blocks[number][OFFSET]])
    made.payload.extend(made.payload[:size])
    made.layout["bytes"] += size


def overlapping(made: Plant) -> None:
    """Say the last fused module's slices again, with a narrower first slice: other blocks, the same slice."""
    pair = [entry for entry in made.blocks if entry[MODULE] == "model.layers.0.mlp.gate_up_proj"]
    (_, rank, inputs), width = pair[0][SHAPE], pair[0][WIDTHS][0]
    end = made.layout["bytes"]
    made.blocks.append([pair[0][MODULE], "A", 0, [width], [1, rank, inputs], end])
    made.blocks.append([pair[0][MODULE], "B", 0, [width], [rank, width], end + 4 * rank * inputs])
    made.payload.extend(bytes(4 * rank * (inputs + width)))
    made.layout["bytes"] = len(made.payload)


def halved(made: Plant) -> None:
    last = made.blocks.pop()
    del made.payload[last[OFFSET] :]
    made.layout["bytes"] = last[OFFSET]


def unequal(made: Plant) -> None:
    """Give the last B one rank less than its A."""
    last = made.blocks[-1]
    last[SHAPE] = [last[SHAPE][0] - 1, last[SHAPE][1]]
    end = last[OFFSET] + -(-4 * last[SHAPE][0] * last[SHAPE][1] // 64) * 64
    del made.payload[end:]
    made.layout["bytes"] = end


def transposed(made: Plant) -> None:
    one, rank, inputs = made.blocks[0][SHAPE]
    width = made.blocks[1][SHAPE][1]
    made.blocks[0][SHAPE] = [one, inputs, rank]
    # B must have A's rank: as many elements as before, in a module as wide as that.
    made.blocks[1][SHAPE] = [inputs, width]
    moved(made, 1, 4 * width * (inputs - rank))


def ranked(made: Plant) -> None:
    """Double the rank of the first module, over the engine's maximum."""
    for number in (0, 1):
        entry = made.blocks[number]
        size = 4 * entry[SHAPE][-2] * entry[SHAPE][-1]
        entry[SHAPE][-2] *= 2
        moved(made, number, size)


def moved(made: Plant, number: int, by: int) -> None:
    """Put `by` zero bytes behind a block, and move what follows."""
    at = made.blocks[number + 1][OFFSET]
    made.payload[at:at] = bytes(by)
    for entry in made.blocks[number + 1 :]:
        entry[OFFSET] += by
    made.layout["bytes"] += by


@case("a segment that is a link", "not a regular file")
def linked(made: Plant) -> None:
    name = f"link-{time.time_ns()}.seg"
    (made.engine.store.root / name).symlink_to("/etc/passwd")
    made.row |= {"segment": name, "offset": 0}


@case("a segment that is a pipe", "not a regular file")
def piped(made: Plant) -> None:
    name = f"pipe-{time.time_ns()}.seg"
    os.mkfifo(made.engine.store.root / name)
    made.row |= {"segment": name, "offset": 0}


@case("a segment that is a directory", "not a regular file")
def folder(made: Plant) -> None:
    made.row |= {"segment": ".", "offset": 0}


@case("a sparse giant", "over the engine's maximum")
def giant(made: Plant) -> None:
    """A terabyte that takes no space, under a layout that agrees with it."""
    rank, inputs, width = 1 << 29, made.blocks[0][SHAPE][2], made.blocks[1][SHAPE][1]
    size_A, size_B = 4 * rank * inputs, 4 * rank * width
    name = f"giant-{time.time_ns()}.seg"
    with (made.engine.store.root / name).open("wb") as file:
        file.truncate(size_A + size_B)
    made.blocks[:] = [
        [DOWN, "A", 0, [width], [1, rank, inputs], 0], [DOWN, "B", 0, [width], [rank, width], size_A],
    ]  # fmt: skip
    made.layout["bytes"] = size_A + size_B
    made.row |= {"segment": name, "offset": 0, "length": size_A + size_B}


@case("a layout of a million blocks", "characters; the limit is")
def long(made: Plant) -> None:
    made.layout_text = json.dumps(made.layout | {"blocks": []})[:-2]
    made.layout_text += ",".join(['["m","A",0,[1],[1,1,16],1024000]'] * 1_000_000) + "]}"
    made.row["length"] = 64_000_000


# On a base of `moe_bases.qwen3_moe`: gate_up_proj has two slices, down_proj one.
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def of_experts(side: str, at: int, value: Any) -> Callable[[Plant], None]:
    """Return a change of one field of the experts' gate and up."""

    def change(made: Plant) -> None:
        found(made, side)[at] = value

    return change


def found(made: Plant, side: str) -> list[Any]:
    return next(entry for entry in made.blocks if entry[:2] == [GATE_UP, side])


def later(made: Plant) -> None:
    """Begin at expert 1, so that the last one is beyond the base's."""
    for side in "AB":
        found(made, side)[6] = 1


def flat(made: Plant) -> None:
    """Say that the experts are one linear module of as many numbers."""
    A, B = found(made, "A"), found(made, "B")
    A[SHAPE] = [A[SHAPE][1], A[SHAPE][0] * A[SHAPE][2], A[SHAPE][3]]
    B[SHAPE] = [B[SHAPE][0] * B[SHAPE][2], sum(B[WIDTHS])]
    A[6:], B[6:] = [], []


def axes_swapped(made: Plant) -> None:
    """Say that slices are experts, and experts slices."""
    width = found(made, "A")[WIDTHS][0]
    for side in "AB":
        entry = found(made, side)
        entry[SHAPE] = [entry[SHAPE][1], entry[SHAPE][0], *entry[SHAPE][2:]]
        entry[WIDTHS] = [width] * entry[SHAPE][1]


def not_a_number(made: Plant) -> None:
    entry = found(made, "B")
    struct.pack_into("<f", made.payload, entry[OFFSET] + 4 * 77, float("nan"))


PLANTED_EXPERTS: dict[str, tuple[Callable[[Plant], None], str]] = {
    "experts: one beyond the last": (later, "expected 8 experts"),
    "experts: as one linear module": (flat, "with experts"),
    "experts: slices for experts": (axes_swapped, "expected outputs (40, 40), found"),
    "experts: NaN": (not_a_number, f"{GATE_UP}.lora_B holds NaN"),
    "experts: a first one that is negative": (of_experts("A", 6, -1), NO_NUMBERS),
    "experts: a first one that is giant": (of_experts("A", 6, 1 << 40), "has no other half"),
    "experts: gate and up of other widths": (of_experts("B", WIDTHS, [40, 39]), "widths contradict"),
    "experts: a rank that is a word": (of_experts("A", SHAPE, [8, 2, "8", 64]), NO_NUMBERS),
}  # fmt: skip
