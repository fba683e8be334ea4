"""How a packed adapter gets into a slot: which strided part of its payload goes where, made once a layout.

Knows blocks, strided views and copies. Knows neither vLLM's layers (slots.py does) nor files.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapters.packed import Block, Layout
from engine.errors import AdapterError

# What one preadv takes (Linux: UIO_MAXIOV).
IOVECS = 1024
# A place in every slot, and the part of the block that belongs there, of one shape but for the slots.
Place = tuple[Tensor, Tensor]


class Module(Protocol):
    """What a plan asks of an engine module's slots."""

    # One flag a slot, where vLLM's kernel asks for it; modules of a layer may share them.
    enabled: Tensor | None

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Say why a block does not fit this module, or None."""

    def places(self, block: Block, whole: Tensor) -> Iterable[Place]:
        """Yield this rank's parts of a block; `whole` has the block's shape and no values.

        Places are (slots, ..., R, width): the rank is the last axis but one, whatever the memory.
        """


@dataclass(frozen=True)
class Region:
    """A part of a block: its place in every slot, and where the payload holds it (elements)."""

    block: Block
    target: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @property
    def key(self) -> tuple[object, ...]:
        """Tell where a region lies, whatever its rank."""
        block = self.block
        return (block.module, block.side, block.first_slice, block.slices, block.first_expert, block.experts)


class Plan:
    """The copies that put any adapter of one layout into a slot; made once a layout."""

    def __init__(self, layout: Layout, modules: Mapping[str, Module]):
        """Raise `AdapterError`, naming the tensor, when the layout does not fit the modules."""
        self.layout = layout
        self.regions = [region for block in layout.blocks for region in _regions(block, layout, modules)]
        # All flags there are, and those of the modules that this layout has blocks for.
        self._flags = [flags for module in modules.values() if (flags := module.enabled) is not None]
        used = [modules[name].enabled for name in {block.module for block in layout.blocks}]
        self._raised = [flags for flags in used if flags is not None]
        self._targets: dict[int, list[Tensor]] = {}
        self._memory: dict[int, list[memoryview]] = {}
        self.can_read = self._is_the_payload()

    @property
    def bytes(self) -> int:
        """How many bytes of the payload this rank needs."""
        return sum(region.shape.numel() for region in self.regions) * self.layout.dtype.itemsize

    def sources(self, payload: Tensor) -> list[Tensor]:
        """Return the regions of a payload (bytes); no bytes move."""
        values = payload.view(self.layout.dtype)
        first = values.storage_offset()
        return [values.as_strided(r.shape, r.strides, first + r.offset) for r in self.regions]

    def fill(self, slot: int, sources: Sequence[Tensor], before: "Plan | None") -> None:
        """Copy an adapter into a slot whose last occupant had the plan `before`; its rest is cleared."""
        if before is not self:
            self._prepare_slot(slot, before)
        for target, source in zip(self._targets_of(slot), sources, strict=True):
            target.copy_(source)

    def read(self, slot: int, descriptor: int, offset: int, before: "Plan | None") -> None:
        """Fill a slot from a file by one call, when `can_read`: the kernel copies, and no page is mapped.

        Raises `OSError` when the file ends early or its disk fails; then the slot is clear.
        """
        if before is not self:
            self._prepare_slot(slot, before)
        if slot not in self._memory:
            raw: list[Any] = [target.view(torch.uint8).flatten().numpy() for target in self._targets_of(slot)]
            self._memory[slot] = [memoryview(each) for each in raw]
        try:
            found = os.preadv(descriptor, self._memory[slot], offset)
            if found != self.bytes:
                raise OSError(errno.EIO, f"{found} of {self.bytes} bytes are left")
        except OSError:
            self.clear(slot)
            raise

    def _is_the_payload(self) -> bool:
        """Say whether the regions in their order are the payload, and each is one run of a slot's memory."""
        ends = [region.offset + region.shape.numel() for region in self.regions]
        return (
            [region.offset for region in self.regions] == [0, *ends[:-1]]
            and len(ends) <= IOVECS
            and self.bytes == self.layout.nbytes
            and all(region.target.device.type == "cpu" for region in self.regions)
            and all(region.target[0].is_contiguous() for region in self.regions)
        )

    def clear(self, slot: int) -> None:
        """Leave nothing of this plan in a slot."""
        for target in self._targets_of(slot):
            target.zero_()
        for flags in self._flags:
            flags[slot] = 0

    def _prepare_slot(self, slot: int, before: "Plan | None") -> None:
        for stale in self._stale(before, slot):
            stale.zero_()
        for flags in self._flags:
            flags[slot] = 0
        for flags in self._raised:
            flags[slot] = 1

    def _targets_of(self, slot: int) -> list[Tensor]:
        if slot not in self._targets:
            self._targets[slot] = [region.target[slot] for region in self.regions]
        return self._targets[slot]

    def _stale(self, before: "Plan | None", slot: int) -> Iterator[Tensor]:
        """Yield what the last occupant wrote and this plan does not write again."""
        ranks: dict[tuple[object, ...], int] = {region.key: region.block.rank for region in self.regions}
        for region in before.regions if before else ():
            rank = ranks.get(region.key, 0)
            if rank < region.block.rank:
                yield region.target[slot][..., rank:, :]


def _regions(block: Block, layout: Layout, modules: Mapping[str, Module]) -> Iterator[Region]:
    if block.module not in modules:
        raise AdapterError(f"the base has no module {block.module} that can carry LoRA.")
    module = modules[block.module]
    reason = module.unsupported_reason(block, layout.dtype)
    if reason is not None:
        raise AdapterError(f"{block.module}.lora_{block.side}: {reason}.")
    start = block.offset // layout.dtype.itemsize
    # Slicing a tensor without memory gives the strides of each part.
    whole = torch.empty(block.shape, dtype=layout.dtype, device="meta")
    for target, part in module.places(block, whole):
        yield Region(block, target, part.shape, part.stride(), start + int(part.storage_offset()))
