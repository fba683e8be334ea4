"""The packed file: a revision's tensors already in the engine's slot layout and dtype.

Projections are fused in the engine (q, k and v into `qkv_proj`, gate and up into `gate_up_proj`), and
the routed experts of a layer are one module. For each module the packed form holds two blocks, A and B,
per run of adjacent slices, and adjacent experts, of one rank; B is rank-major. A slot is filled by one
copy per block, however many experts there are. Scaling is folded in before packing (alpha = rank).

Shapes: E experts, M slices of a fused module, R rank, I input features, O output features of a slice.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.base.families import EXPERT, FUSED
from engine.errors import AdapterError
from engine.files import aligned

FORMAT_VERSION = 2
# Version 1 had no experts; everything else is written the same way.
READABLE_VERSIONS = (1, 2)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Block:
    """One factor of a run of adjacent slices (and experts) of an engine module.

    `shape` is (M, R, I) for side A and (R, sum of `widths`) for side B; with `experts` (their number, 0
    for a linear module, the first of them `first_expert`) it is (E, M, R, I) and (E, M, R, O). `offset`
    is in bytes from the payload's start.
    """

    module: str
    side: str
    first_slice: int
    widths: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    first_expert: int = 0

    @property
    def rank(self) -> int:
        """Return the rank R."""
        return self.shape[-2]

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> int:
        """Return the number of slices, M."""
        return len(self.widths)

    @property
    def experts(self) -> int:
        """Return the number of experts, E; 0 for a linear module."""
        return self.shape[0] if len(self.shape) == 4 else 0


@dataclass(frozen=True)
class PackedLayout:
    """Where each block of a payload lies. Adapters of the same shapes share one layout."""

    dtype: torch.dtype
    nbytes: int
    blocks: tuple[Block, ...]

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of `to_json`, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def rank(self) -> int:
        """Return the largest rank of a block."""
        return max(block.rank for block in self.blocks)

    def to_json(self) -> str:
        """Return the layout as the catalog stores it; the same layout always gives the same text."""
        blocks = [
            [b.module, b.side, b.first_slice, b.widths, b.shape, b.offset]
            + [b.first_expert] * (b.experts > 0)
            for b in self.blocks
        ]
        body = {"v": FORMAT_VERSION, "dtype": DTYPE_NAMES[self.dtype], "bytes": self.nbytes, "blocks": blocks}
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "PackedLayout":
        """Parse a layout; `AdapterError` when it is malformed. `check_layout` verifies its numbers."""
        try:
            body = json.loads(text)
            if body["v"] not in READABLE_VERSIONS:
                raise AdapterError(
                    f"The packed layout has format version {str(body['v'])[:20]}, this engine reads "
                    f"{' and '.join(map(str, READABLE_VERSIONS))}. Export the revision again."
                )
            blocks = tuple(
                Block(m, s, f, tuple(w), tuple(shape), *rest) for m, s, f, w, shape, *rest in body["blocks"]
            )
            return PackedLayout(DTYPES[body["dtype"]], body["bytes"], blocks)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise AdapterError("The packed layout is malformed. Export the revision again.") from None


@dataclass(frozen=True)
class Packed:
    """A layout and the bytes that it describes, a uint8 tensor of one axis."""

    layout: PackedLayout
    payload: Tensor

    def block(self, block: Block) -> Tensor:
        """Return one block as a view on the payload."""
        return view_block(self.layout, self.payload, block)

    def tobytes(self) -> memoryview:
        """Return the payload's bytes, without a copy."""
        return memoryview(self.payload.numpy())  # type: ignore[arg-type]


def view_block(layout: PackedLayout, payload: Tensor, block: Block) -> Tensor:
    """Return a block of a uint8 payload as a tensor of its shape and the layout's dtype; a view."""
    raw = payload[block.offset : block.offset + block.count * layout.dtype.itemsize]
    return raw.view(layout.dtype).view(block.shape)


def pack(tensors: Mapping[str, Tensor], dtype: torch.dtype, fused: Mapping[str, tuple[str, ...]]) -> Packed:
    """Pack canonical tensors (`<module>.lora_A` (R, I), `<module>.lora_B` (O, R)) for the engine in `dtype`.

    `fused` are the engine's fused modules of this base (`BaseShapes.fused`). Raises `AdapterError` that
    names the tensor when a factor has no partner or the ranks differ.
    """
    pairs = _pairs(tensors)
    blocks: list[Block] = []
    sources: list[list[Tensor]] = []
    offset = 0
    for run in _runs(pairs, fused):
        factors = [pairs[name] for name in run.names]
        rank, inputs = factors[0][0].shape
        widths = tuple(pairs[name][1].shape[0] for name in run.names[: run.slices])
        for side in "AB":
            shape: tuple[int, ...]
            if run.experts:
                shape = (run.experts, run.slices, rank, inputs if side == "A" else widths[0])
            else:
                shape = (run.slices, rank, inputs) if side == "A" else (rank, sum(widths))
            block = Block(run.module, side, run.first_slice, widths, shape, offset, run.first_expert)
            blocks.append(block)
            sources.append([a if side == "A" else b.T for a, b in factors])
            offset += aligned(block.count * dtype.itemsize)
    layout = PackedLayout(dtype, offset, tuple(blocks))
    payload = torch.zeros(offset, dtype=torch.uint8)
    for block, source in zip(blocks, sources, strict=True):
        whole = torch.cat(source, dim=1) if block.side == "B" and not block.experts else torch.stack(source)
        view_block(layout, payload, block).copy_(whole.view(block.shape))
    return Packed(layout, payload)


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Return the canonical tensors of a packed adapter, as copies; the exact inverse of `pack`."""
    tensors = {}
    for block in packed.layout.blocks:
        for name, value in projections(block, packed.block(block)):
            tensors[f"{name}.lora_{block.side}"] = (
                (value if block.side == "A" else value.T).contiguous().clone()
            )
    return tensors


def write_file(packed: Packed, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a packed adapter as a safetensors container that any tool can open."""
    header: dict[str, Any] = {"__metadata__": {"layout": packed.layout.to_json(), **metadata}}
    padding: dict[str, Any] = {}
    for i, block in enumerate(packed.layout.blocks):
        end = block.offset + packed.block(block).nbytes
        first = f"{block.first_expert}.{block.first_slice}" if block.experts else block.first_slice
        header[f"{block.module}.{first}.{block.side}"] = {
            "dtype": DTYPE_NAMES[packed.layout.dtype],
            "shape": list(block.shape),
            "data_offsets": [block.offset, end],
        }
        # The container allows no holes: the padding between aligned blocks is listed as bytes.
        if end < (start := aligned(end)):
            padding[f"padding.{i}"] = {"dtype": "U8", "shape": [start - end], "data_offsets": [end, start]}
    text = json.dumps(header | padding, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(packed.tobytes())


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = {}
    for name in sorted({key.rpartition(".lora_")[0] for key in tensors}):
        a, b = tensors.get(f"{name}.lora_A"), tensors.get(f"{name}.lora_B")
        if a is None or b is None:
            raise AdapterError(f"{name}: lora_{'A' if a is None else 'B'} is missing.")
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"{name}: expected lora_A (R, I) and lora_B (O, R) of one rank, "
                f"found {tuple(a.shape)} and {tuple(b.shape)}."
            )
        pairs[name] = (a, b)
    if not pairs:
        raise AdapterError("The adapter has no lora_A and lora_B tensors.")
    return pairs


@dataclass(frozen=True)
class _SliceRun:
    """Projections that share two blocks; `names` are expert by expert, slice by slice."""

    module: str
    first_slice: int
    slices: int
    names: tuple[str, ...]
    first_expert: int = 0
    experts: int = 0


def _runs(
    pairs: Mapping[str, tuple[Tensor, Tensor]], fused: Mapping[str, tuple[str, ...]]
) -> list[_SliceRun]:
    """Group projections into runs of adjacent slices, and of adjacent experts, of one rank."""
    slice_of = {part: (name, i) for name, parts in fused.items() for i, part in enumerate(parts)}
    # module -> expert (-1 outside experts) -> slice -> (rank, name)
    modules: dict[str, dict[int, dict[int, tuple[int, str]]]] = {}
    for name, (a, _) in pairs.items():
        routed = EXPERT.fullmatch(name)
        parent, _, leaf = name.rpartition(".")
        engine_leaf, index = slice_of.get(leaf, (leaf, 0))
        module = f"{routed['parent'] if routed else parent}.{engine_leaf}"
        expert = int(routed["number"]) if routed else -1
        modules.setdefault(module, {}).setdefault(expert, {})[index] = (a.shape[0], name)
    runs = []
    for module in sorted(modules):
        experts = modules[module]
        ranks = {number: {i: rank for i, (rank, _) in parts.items()} for number, parts in experts.items()}
        for numbers in _adjacent(ranks):
            for indices in _adjacent(ranks[numbers[0]]):
                names = tuple(experts[number][index][1] for number in numbers for index in indices)
                first, count = max(numbers[0], 0), len(numbers) if numbers[0] >= 0 else 0
                runs.append(_SliceRun(module, indices[0], len(indices), names, first, count))
    return runs


def _adjacent(values: Mapping[int, Any]) -> list[list[int]]:
    """Split numbers into runs of consecutive ones with one value."""
    # Within a run (number - position) is constant.
    groups = groupby(enumerate(sorted(values)), key=lambda item: (item[1] - item[0], values[item[1]]))
    return [[number for _, number in group] for _, group in groups]


def projections(block: Block, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each projection's name and its factor (R, I) or (R, O), as views on a block's `values`.

    `values` has the block's shape; leading axes, such as one of adapters, stay in each factor.
    """
    parent, _, leaf = block.module.rpartition(".")
    leaves = FUSED.get(leaf, (leaf,))[block.first_slice : block.first_slice + block.slices]
    if block.experts:
        for i in range(block.experts):
            for j, part in enumerate(leaves):
                yield f"{parent}.{block.first_expert + i}.{part}", values[..., i, j, :, :]
        return
    split = values.unbind(-3) if block.side == "A" else values.split(block.widths, dim=-1)
    for part, value in zip(leaves, split, strict=True):
        yield f"{parent}.{part}", value
