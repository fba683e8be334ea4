"""Copy a packed adapter into a slot: a plan, made once for each layout, maps its payload to the slot.

slots.py says where a block belongs in vLLM's layers; this module turns that into strided copies or reads.
"""

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.packed import Block, PackedLayout
from engine.errors import AdapterError

# Limits of one preadv on Linux: UIO_MAXIOV vectors, and fewer bytes than 0x7ffff000.
IOVECS = 1024
READ_BYTES = 1 << 30
# Called by ctypes because Python's preadv needs an object for every run.
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
LIBC.preadv.restype = ctypes.c_ssize_t
# A place in every slot (S, ...), and the part of the block that belongs there (...).
Place = tuple[Tensor, Tensor]


class Module(Protocol):
    """What a plan needs of an engine module's slots."""

    # One flag for each slot (S,), if vLLM's kernel reads one; modules of a layer may share them.
    enabled: Tensor | None

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Return why a block does not fit this module, or None."""

    def places(self, block: Block, whole: Tensor) -> Iterable[Place]:
        """Yield this rank's parts of a block; `whole` is a meta tensor of the block's shape.

        Places are (S, ..., R, width): the rank is the last axis but one, whatever the memory layout.
        """


@dataclass(frozen=True)
class Region:
    """A part of a block: `target` in every slot (S, ...), and its place in the payload (in elements).

    `key` identifies its place in a slot, whatever the adapter's rank.
    """

    block: Block
    key: tuple[object, ...]
    rank: int
    target: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class SlotCopyPlan:
    """The copies that put any adapter of one layout into a slot."""

    def __init__(self, layout: PackedLayout, modules: Mapping[str, Module]):
        """Plan the copies. Raises `AdapterError` with the tensor that does not fit its module."""
        self.layout = layout
        self.regions = [region for block in layout.blocks for region in _regions(block, layout, modules)]
        # The flags of all modules, and those of the modules with blocks in this layout.
        self._flags = [flags for module in modules.values() if (flags := module.enabled) is not None]
        used = [modules[name].enabled for name in {block.module for block in layout.blocks}]
        self._raised = [flags for flags in used if flags is not None]
        self._targets: dict[int, list[Tensor]] = {}
        self._ranks = {region.key: region.rank for region in self.regions}
        self.can_read = self._is_the_payload()
        self._runs = _runs(self.regions) if self.can_read else None

    @property
    def bytes(self) -> int:
        """The number of payload bytes that this rank copies."""
        return sum(region.shape.numel() for region in self.regions) * self.layout.dtype.itemsize

    def sources(self, payload: Tensor) -> list[Tensor]:
        """Return the regions of a payload (uint8) as views in the layout's dtype; copies nothing."""
        values = payload.view(self.layout.dtype)
        first = values.storage_offset()
        return [values.as_strided(r.shape, r.strides, first + r.offset) for r in self.regions]

    def copy_to_slot(self, slot: int, sources: Sequence[Tensor], before: "SlotCopyPlan | None") -> None:
        """Copy `sources` into a slot; what its last occupant (plan `before`) wrote elsewhere is cleared."""
        if before is not self:
            self._prepare_slot(slot, before)
        for target, source in zip(self._targets_of(slot), sources, strict=True):
            target.copy_(source)

    def read(self, slot: int, descriptor: int, offset: int, before: "SlotCopyPlan | None") -> None:
        """Fill a slot from a file by `preadv`, without mapping a page; only when `can_read`.

        Raises `OSError` when the file is truncated or its disk fails; the slot is then clear.
        """
        if before is not self:
            self._prepare_slot(slot, before)
        assert self._runs is not None
        try:
            self._runs.read(slot, descriptor, offset)
        except OSError:
            self.clear(slot)
            raise

    def _is_the_payload(self) -> bool:
        """Return whether the regions in order cover the whole payload, contiguously and on the CPU."""
        ends = [region.offset + region.shape.numel() for region in self.regions]
        return (
            [region.offset for region in self.regions] == [0, *ends[:-1]]
            and self.bytes == self.layout.nbytes
            and all(region.target.device.type == "cpu" for region in self.regions)
            and all(torch.empty(r.shape, device="meta").stride() == r.strides for r in self.regions)
        )

    def clear(self, slot: int) -> None:
        """Zero everything that this plan writes into a slot."""
        for target in self._targets_of(slot):
            target.zero_()
        for flags in self._flags:
            flags[slot] = 0

    def _prepare_slot(self, slot: int, before: "SlotCopyPlan | None") -> None:
        for stale in self.stale(before, slot):
            stale.zero_()
        for flags in self._flags:
            flags[slot] = 0
        for flags in self._raised:
            flags[slot] = 1

    def _targets_of(self, slot: int) -> list[Tensor]:
        if slot not in self._targets:
            self._targets[slot] = [region.target[slot] for region in self.regions]
        return self._targets[slot]

    def stale(self, before: "SlotCopyPlan | None", slot: int) -> Iterator[Tensor]:
        """Yield the parts of a slot that the last occupant wrote and this plan does not overwrite."""
        for region in before.regions if before else ():
            rank = self._ranks.get(region.key, 0)
            if rank < region.rank:
                yield region.target[slot][..., rank:, :]


@dataclass(frozen=True)
class Runs:
    """A payload's destinations in order: N runs of contiguous memory, by address in slot 0 and size.

    `addresses`, `sizes` and `steps` (bytes from one slot to the next) are uint64 arrays (N,); an adapter of
    low rank has a run for every expert and row, tens of thousands, too many for Python objects. `cuts`
    divides them into batches of one preadv each.
    """

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    steps: NDArray[np.uint64]
    cuts: tuple[int, ...]

    def read(self, slot: int, descriptor: int, offset: int) -> None:
        """Scatter a file into a slot. Raises `OSError` when the file is truncated or its disk fails."""
        vectors = np.stack([self.addresses + self.steps * np.uint64(slot), self.sizes], axis=1)
        done, wanted = 0, int(self.sizes.sum())
        for first, last in pairwise(self.cuts):
            left = vectors[first:last]
            while len(left):
                count = preadv(descriptor, left, offset + done)
                if not count:
                    raise OSError(errno.EIO, f"the file ends after {done} of {wanted} bytes")
                done += count
                left = _after(left, count)


def preadv(descriptor: int, vectors: NDArray[np.uint64], offset: int) -> int:
    """Read into `vectors` (N, 2: address, bytes); return the number of bytes, 0 at the end of the file."""
    while True:
        count: int = LIBC.preadv(descriptor, vectors.ctypes.data, len(vectors), offset)
        if count >= 0:
            return count
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _after(vectors: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """Return the rest of `vectors` after `found` bytes; a partly filled vector is changed in place."""
    ends = np.cumsum(vectors[:, 1])
    full = int(np.searchsorted(ends, np.uint64(count), side="right"))
    left = vectors[full:]
    if len(left):
        begun = np.uint64(count) - (ends[full - 1] if full else np.uint64(0))
        left[0, 0] += begun
        left[0, 1] -= begun
    return left


def _runs(regions: Sequence[Region]) -> Runs:
    addresses, sizes, steps = [], [], []
    for region in regions:
        target, item = region.target[0], region.target.element_size()
        whole = _whole_axes(target)
        starts = np.array([target.data_ptr()], np.uint64)
        for size, stride in zip(target.shape[:whole], target.stride()[:whole], strict=True):
            starts = (starts[:, None] + np.arange(size, dtype=np.uint64) * np.uint64(stride * item)).ravel()
        addresses.append(starts)
        sizes.append(np.full(len(starts), target.shape[whole:].numel() * item, np.uint64))
        steps.append(np.full(len(starts), region.target.stride(0) * item, np.uint64))
    return _cut(*(np.concatenate(each) for each in (addresses, sizes, steps)))


def _cut(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], steps: NDArray[np.uint64]) -> Runs:
    """Split runs longer than `READ_BYTES`, and divide all runs into batches of one preadv each."""
    limit = np.uint64(READ_BYTES)
    parts = -(-sizes.astype(np.int64) // READ_BYTES)
    # The index of each part in its run.
    nth = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    before = nth.astype(np.uint64) * limit
    sizes = np.minimum(np.repeat(sizes, parts) - before, limit)
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        start = ends[cuts[-1] - 1] if cuts[-1] else np.uint64(0)
        cuts.append(min(cuts[-1] + IOVECS, int(np.searchsorted(ends, start + limit, side="right"))))
    return Runs(np.repeat(addresses, parts) + before, sizes, np.repeat(steps, parts), tuple(cuts))


def _whole_axes(target: Tensor) -> int:
    """Return the number of leading axes to iterate over so that the remaining ones are contiguous."""
    axis = target.dim()
    while axis and target.stride(axis - 1) == target.shape[axis:].numel():
        axis -= 1
    return axis


def _regions(block: Block, layout: PackedLayout, modules: Mapping[str, Module]) -> Iterator[Region]:
    if block.module not in modules:
        raise AdapterError(f"the base has no module {block.module} that can carry LoRA.")
    module = modules[block.module]
    reason = module.unsupported_reason(block, layout.dtype)
    if reason is not None:
        raise AdapterError(f"{block.module}.lora_{block.side}: {reason}.")
    start = block.offset // layout.dtype.itemsize
    key = block.module, block.side, block.first_slice, block.slices, block.first_expert, block.experts
    # Slicing a meta tensor gives the strides of each part.
    whole = torch.empty(block.shape, dtype=layout.dtype, device="meta")
    for target, part in module.places(block, whole):
        offset = start + int(part.storage_offset())
        yield Region(block, key, block.rank, target, part.shape, part.stride(), offset)
