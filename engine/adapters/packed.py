"""The packed file: a revision's tensors already in the engine's slot layout and dtype.

A dense decoder's projections are fused in the engine (q, k and v into `qkv_proj`; gate and up into
`gate_up_proj`). For each fused module the packed form holds two blocks per run of adjacent adapted
slices: A as (slices, rank, in) and B rank-major as (rank, out of all slices), so that a slot is
filled by one copy per block. Scaling is folded in before packing (alpha = rank).

Knows layouts and bytes. Knows neither where bytes are stored nor what vLLM does with them.

Shapes: R rank, I input features, O output features.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import AdapterError

FORMAT_VERSION = 1
ALIGNMENT = 64
# The engine's fused modules and their slices in order; any other projection is a module of one slice.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
SLICE_OF = {part: (fused, i) for fused, parts in FUSED.items() for i, part in enumerate(parts)}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ModuleShape:
    """One linear projection of the base that can carry LoRA."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Block:
    """One factor of a run of adjacent slices of an engine module.

    `shape` is (slices, R, I) for side A and (R, sum of `widths`) for side B; `offset` is in bytes
    from the payload's start.
    """

    module: str
    side: str
    first_slice: int
    widths: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def rank(self) -> int:
        return self.shape[-2]

    @property
    def slices(self) -> int:
        return len(self.widths)


@dataclass(frozen=True)
class Layout:
    """Where each block of a payload lies. Adapters of the same shapes share one layout."""

    dtype: torch.dtype
    nbytes: int
    blocks: tuple[Block, ...]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def rank(self) -> int:
        return max(block.rank for block in self.blocks)

    def to_json(self) -> str:
        blocks = [[b.module, b.side, b.first_slice, b.widths, b.shape, b.offset] for b in self.blocks]
        body = {"v": FORMAT_VERSION, "dtype": DTYPE_NAMES[self.dtype], "bytes": self.nbytes, "blocks": blocks}
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Layout":
        body = json.loads(text)
        if body["v"] != FORMAT_VERSION:
            raise AdapterError(
                f"The packed layout has format version {body['v']}, this engine reads {FORMAT_VERSION}. "
                "Run `graftwork store repack`."
            )
        blocks = tuple(Block(m, s, f, tuple(w), tuple(shape), o) for m, s, f, w, shape, o in body["blocks"])
        return Layout(DTYPES[body["dtype"]], body["bytes"], blocks)


@dataclass(frozen=True)
class Packed:
    """A layout and the bytes that it describes."""

    layout: Layout
    payload: Tensor

    def block(self, block: Block) -> Tensor:
        """Return one block as a view on the payload."""
        return view_block(self.layout, self.payload, block)

    def tobytes(self) -> memoryview:
        return memoryview(self.payload.numpy())  # type: ignore[arg-type]


def view_block(layout: Layout, payload: Tensor, block: Block) -> Tensor:
    """Return a block of a uint8 payload as a tensor of its shape; no bytes move."""
    count = 1
    for size in block.shape:
        count *= size
    raw = payload[block.offset : block.offset + count * layout.dtype.itemsize]
    return raw.view(layout.dtype).view(block.shape)


def shapes(config: Any) -> tuple[ModuleShape, ...]:
    """Return every projection of a dense decoder that can carry LoRA, from its `config.json`.

    `config` is a transformers config or its dictionary.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    hidden, heads, inner = (
        values[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    head_dim = values.get("head_dim") or hidden // heads
    keys = (values.get("num_key_value_heads") or heads) * head_dim
    table = {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return tuple(
        ModuleShape(f"model.layers.{layer}.{name}", inputs, outputs)
        for layer in range(values["num_hidden_layers"])
        for name, (inputs, outputs) in table.items()
    )


def pack(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Packed:
    """Pack canonical tensors (`<module>.lora_A` (R, I), `<module>.lora_B` (O, R)) for the engine.

    Raises `AdapterError` that names the tensor when a factor has no partner or the ranks differ.
    """
    pairs = _pairs(tensors)
    runs = _runs({name: (a.shape[0], a.shape[1], b.shape[0]) for name, (a, b) in pairs.items()})
    blocks: list[Block] = []
    offset = 0
    for module, first, names in runs:
        rank, inputs = pairs[names[0]][0].shape
        widths = tuple(pairs[name][1].shape[0] for name in names)
        for side, shape in (("A", (len(names), rank, inputs)), ("B", (rank, sum(widths)))):
            blocks.append(Block(module, side, first, widths, tuple(shape), offset))
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    layout = Layout(dtype, offset, tuple(blocks))
    payload = torch.zeros(offset, dtype=torch.uint8)
    for block, (_, _, names) in zip(blocks, (run for run in runs for _ in "AB"), strict=True):
        target = view_block(layout, payload, block)
        for i, part in enumerate(_columns(block)):
            a, b = pairs[names[i]]
            if block.side == "A":
                target[i].copy_(a)
            else:
                target[:, part].copy_(b.T)
    return Packed(layout, payload)


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Return the canonical tensors of a packed adapter; the exact inverse of `pack`."""
    tensors = {}
    for block in packed.layout.blocks:
        values = packed.block(block)
        for i, part in enumerate(_columns(block)):
            name = _slice_name(block.module, block.first_slice + i)
            value = values[i] if block.side == "A" else values[:, part].T
            tensors[f"{name}.lora_{block.side}"] = value.contiguous().clone()
    return tensors


def write_file(packed: Packed, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a packed adapter as a safetensors container that any tool can open."""
    header: dict[str, Any] = {"__metadata__": {"layout": packed.layout.to_json(), **metadata}}
    for block in packed.layout.blocks:
        nbytes = packed.block(block).nbytes
        key = f"{block.module}.{block.first_slice}.{block.side}"
        dtype = DTYPE_NAMES[packed.layout.dtype]
        header[key] = {
            "dtype": dtype,
            "shape": list(block.shape),
            "data_offsets": [block.offset, block.offset + nbytes],
        }
    # The container allows no holes: the padding between aligned blocks is listed as bytes.
    ends = sorted(value["data_offsets"] for key, value in header.items() if key != "__metadata__")
    for i, (end, start) in enumerate(
        zip([e for _, e in ends], [s for s, _ in ends[1:]] + [packed.layout.nbytes], strict=True)
    ):
        if end < start:
            header[f"padding.{i}"] = {"dtype": "U8", "shape": [start - end], "data_offsets": [end, start]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(packed.tobytes())


def read_file(path: Path) -> Packed:
    """Read a packed file. Raises `AdapterError` when it is truncated or not a packed file."""
    data = path.read_bytes()
    try:
        (size,) = struct.unpack_from("<Q", data)
        layout = Layout.from_json(json.loads(data[8 : 8 + size])["__metadata__"]["layout"])
    except (struct.error, ValueError, KeyError, TypeError):
        raise AdapterError(f"{path} is not a packed adapter file.") from None
    payload = torch.frombuffer(bytearray(data[8 + size :]), dtype=torch.uint8)
    if payload.numel() != layout.nbytes:
        raise AdapterError(
            f"{path} holds {payload.numel()} bytes of tensors, its layout says {layout.nbytes}."
        )
    return Packed(layout, payload)


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


def _runs(sizes: Mapping[str, tuple[int, int, int]]) -> list[tuple[str, int, list[str]]]:
    """Group projections into (engine module, first slice, names) of adjacent slices of one rank."""
    members = []
    for name, (rank, _, _) in sizes.items():
        parent, _, leaf = name.rpartition(".")
        fused, index = SLICE_OF.get(leaf, (leaf, 0))
        members.append((f"{parent}.{fused}", index, rank, name))
    members.sort()
    runs = []
    # Slices of a run rise one by one, so (slice - position) is constant within it.
    numbered = enumerate(members)
    for (module, *_), group in groupby(
        numbered, key=lambda item: (item[1][0], item[1][1] - item[0], item[1][2])
    ):
        items = [member for _, member in group]
        runs.append((module, items[0][1], [member[3] for member in items]))
    return runs


def _columns(block: Block) -> list[slice]:
    columns, start = [], 0
    for width in block.widths:
        columns.append(slice(start, start + width))
        start += width
    return columns


def _slice_name(module: str, index: int) -> str:
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{FUSED[leaf][index]}" if leaf in FUSED else module
