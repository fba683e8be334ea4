"""Slots: where the engine's layers keep the factors of the adapters that a step may use.

Knows the shapes of vLLM's LoRA layers (0.26 to 0.32) and how a packed block gets into a slot. Knows no
adapter by name and no file.

Shapes: S slots, E experts, M slices of a fused module, R the engine's largest rank, I input features,
O output features (of all slices for a linear module, of one for experts).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from engine.adapters.packed import Block


class SlotViews(tuple[Tensor, ...]):
    """The views of a module's slots in vLLM's own shapes, with the storage behind them."""

    storage: "SlotBuffers"


class SlotBuffers:
    """Every slot of one engine module: A (slots, slices, R, I), B rank-major (slots, R, O)."""

    def __init__(self, name: str, layer: BaseLinearLayerWithLoRA):
        first = layer.lora_a_stacked[0]
        slots, _, rank, inputs = first.shape
        self.name, self.rank, self.inputs, self.dtype = name, rank, inputs, first.dtype
        self.widths = tuple(b.shape[2] for b in layer.lora_b_stacked)
        self.a_SMRI = first.new_zeros(slots, len(self.widths), rank, inputs)
        self.b_SRO = first.new_zeros(slots, rank, sum(self.widths))
        # The rank that a slot's last occupant used: only that much is ever cleared.
        self.used = [0] * slots
        starts = [sum(self.widths[:i]) for i in range(len(self.widths))]
        layer.lora_a_stacked = self._views(self.a_SMRI[:, i : i + 1] for i in range(len(self.widths)))
        layer.lora_b_stacked = self._views(
            self.b_SRO[:, None, :, start : start + width].transpose(-1, -2)
            for start, width in zip(starts, self.widths, strict=True)
        )

    def _views(self, tensors: Any) -> SlotViews:
        views = SlotViews(tensors)
        views.storage = self
        return views

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Say why a block does not fit this module, or None."""
        end = block.first_slice + block.slices
        widths = self.widths[block.first_slice : end]
        if end > len(self.widths) or block.widths != widths:
            return f"expected outputs {widths}, found {block.widths}"
        if block.side == "A" and block.shape[2] != self.inputs:
            return f"expected {self.inputs} inputs, found {block.shape[2]}"
        if block.rank > self.rank:
            return f"rank {block.rank} is over the engine's maximum of {self.rank}"
        if dtype != self.dtype:
            return f"expected {self.dtype}, found {dtype}"
        return None

    def fill(self, slot: int, blocks: Sequence[tuple[Block, Tensor]]) -> None:
        """Put an adapter's blocks into a slot; what the last occupant left is cleared."""
        rank = max((block.rank for block, _ in blocks), default=0)
        whole = len(blocks) == 2 and blocks[0][0].slices == len(self.widths)
        stale = slice(rank if whole else 0, self.used[slot])
        self.a_SMRI[slot, :, stale].zero_()
        self.b_SRO[slot, stale].zero_()
        for block, values in blocks:
            first, end = block.first_slice, block.first_slice + block.slices
            if block.side == "A":
                self.a_SMRI[slot, first:end, : block.rank].copy_(values)
            else:
                start = sum(self.widths[:first])
                self.b_SRO[slot, : block.rank, start : start + sum(block.widths)].copy_(values)
        self.used[slot] = rank


class StackedSlots(SlotBuffers):
    """vLLM's own tensors of one module, for its Triton operations: they refuse views (`_get_lora_a_ptr`)."""

    def __init__(self, name: str, layer: BaseLinearLayerWithLoRA):
        self.a_stacked, self.b_stacked = layer.lora_a_stacked, layer.lora_b_stacked
        slots, _, rank, inputs = self.a_stacked[0].shape
        self.name, self.rank, self.inputs, self.dtype = name, rank, inputs, self.a_stacked[0].dtype
        self.widths = tuple(b.shape[2] for b in self.b_stacked)
        self.used = [0] * slots

    def fill(self, slot: int, blocks: Sequence[tuple[Block, Tensor]]) -> None:
        """Put an adapter's blocks into a slot, slice by slice; what the last occupant left is cleared."""
        for a_S1RI, b_S1OR in zip(self.a_stacked, self.b_stacked, strict=True):
            a_S1RI[slot, 0, : self.used[slot]].zero_()
            b_S1OR[slot, 0, :, : self.used[slot]].zero_()
        for block, values in blocks:
            whole = values.to(self.a_stacked[0].device)
            parts = whole if block.side == "A" else whole.split(block.widths, dim=1)
            for i, part in enumerate(parts, start=block.first_slice):
                if block.side == "A":
                    self.a_stacked[i][slot, 0, : block.rank].copy_(part)
                else:
                    self.b_stacked[i][slot, 0, :, : block.rank].copy_(part.T)
        self.used[slot] = max((block.rank for block, _ in blocks), default=0)


class ExpertSlots:
    """Every slot of a projection of a layer's experts: A (S, E, M, R, I), B rank-major (S, E, M, R, O)."""

    def __init__(
        self, slots: int, experts: int, slices: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype
    ):
        self.rank, self.dtype = rank, dtype
        self.a_SEMRI = torch.zeros(slots, experts, slices, rank, inputs, dtype=dtype)
        self.b_SEMRO = torch.zeros(slots, experts, slices, rank, outputs, dtype=dtype)
        # The rank that a slot's last occupant used: only that much is ever cleared.
        self.used = [0] * slots

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Say why a block does not fit this module, or None."""
        _, experts, slices, _, inputs = self.a_SEMRI.shape
        outputs = self.b_SEMRO.shape[-1]
        if block.first_expert + block.experts > experts or block.first_slice + block.slices > slices:
            return f"expected {experts} experts of {slices} slices, found {block.shape[:2]}"
        if block.side == "A" and block.shape[-1] != inputs:
            return f"expected {inputs} inputs, found {block.shape[-1]}"
        if set(block.widths) != {outputs}:
            return f"expected outputs {outputs}, found {block.widths}"
        if block.rank > self.rank:
            return f"rank {block.rank} is over the engine's maximum of {self.rank}"
        if dtype != self.dtype:
            return f"expected {self.dtype}, found {dtype}"
        return None

    def fill(self, slot: int, blocks: Sequence[tuple[Block, Tensor]]) -> None:
        """Put an adapter's blocks into a slot; what the last occupant left is cleared."""
        used = self.used[slot]
        self.a_SEMRI[slot, :, :, :used].zero_()
        self.b_SEMRO[slot, :, :, :used].zero_()
        for block, values in blocks:
            experts = slice(block.first_expert, block.first_expert + block.experts)
            slices = slice(block.first_slice, block.first_slice + block.slices)
            target = self.a_SEMRI if block.side == "A" else self.b_SEMRO
            target[slot, experts, slices, : block.rank].copy_(values)
        self.used[slot] = max((block.rank for block, _ in blocks), default=0)
