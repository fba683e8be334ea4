"""Slots: the buffers in the engine's layers that hold the LoRA factors of a step's adapters.

For each kind of LoRA layer of vLLM (0.26 to 0.32) a class maps a block of a packed file to its place in the
slots, and to the slices that this tensor-parallel rank holds.

Shapes: S slots, E experts, M slices of a fused module, R the engine's largest rank, I input features,
O output features (of all slices for a linear module, of one for experts); I and O are this rank's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
)
from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

from engine.adapters.packed import Block
from engine.base.families import DROPPED_ON_CUDA
from engine.serving.worker.slot_copy import Place


@dataclass(frozen=True)
class Cut:
    """The features that this rank holds: `width` of `total`, from `start`."""

    start: int
    width: int
    total: int

    @staticmethod
    def of(width: int, rank: int, total: int) -> "Cut":
        """Return the part of rank `rank` when each rank holds `width` features."""
        return Cut(width * rank, width, total)

    @staticmethod
    def whole(width: int) -> "Cut":
        """Return the cut of a rank that holds all features."""
        return Cut(0, width, width)

    @property
    def range(self) -> slice:
        """The features as an index into the full axis."""
        return slice(self.start, self.start + self.width)


class ModuleSlots:
    """Base class: shapes of a module's slots and the check of a block; `experts` is 0 if it is linear."""

    enabled: Tensor | None = None

    def __init__(self, rank: int, dtype: torch.dtype, inputs: Cut, outputs: Sequence[Cut], experts: int = 0):
        self.rank, self.dtype, self.experts = rank, dtype, experts
        self.inputs, self.outputs = inputs, tuple(outputs)
        # This rank's output features of each slice.
        self.widths = tuple(cut.width for cut in self.outputs)

    def places(self, block: Block, whole: Tensor) -> Iterator[Place]:
        """Yield this rank's parts of a block and their places; see `slot_copy.Module`."""
        raise NotImplementedError

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Return why a block does not fit this module, or None."""
        end = block.first_slice + block.slices
        totals = tuple(cut.total for cut in self.outputs[block.first_slice : end])
        if bool(block.experts) != bool(self.experts):
            return f"expected a block {'with' if self.experts else 'without'} experts"
        if block.first_expert + block.experts > self.experts:
            return f"expected {self.experts} experts, found {block.first_expert + block.experts}"
        if end > len(self.outputs) or block.widths != totals:
            return f"expected outputs {totals}, found {block.widths}"
        if block.side == "A" and block.shape[-1] != self.inputs.total:
            return f"expected {self.inputs.total} inputs, found {block.shape[-1]}"
        if block.rank > self.rank:
            return f"rank {block.rank} is over the engine's maximum of {self.rank}"
        if dtype != self.dtype:
            return f"expected {self.dtype}, found {dtype}"
        return None


class SlotViews(tuple[Tensor, ...]):
    """Views of a module's slots in vLLM's shapes; `storage` holds the buffers behind them."""

    storage: "SlotBuffers"


class SlotBuffers(ModuleSlots):
    """Every slot of one linear module: A (S, M, R, I), B rank-major (S, R, O)."""

    def __init__(self, layer: BaseLinearLayerWithLoRA):
        first = layer.lora_a_stacked[0]
        slots, _, rank, inputs = first.shape
        super().__init__(rank, first.dtype, *_linear_cuts(layer))
        self.a_SMRI = first.new_zeros(slots, len(self.widths), rank, inputs)
        self.b_SRO = first.new_zeros(slots, rank, sum(self.widths))
        self._starts = (0, *accumulate(self.widths))
        layer.lora_a_stacked = self._views(self.a_SMRI[:, i : i + 1] for i in range(len(self.widths)))
        layer.lora_b_stacked = self._views(
            self.b_SRO[:, None, :, start : start + width].transpose(-1, -2)
            for start, width in zip(self._starts, self.widths, strict=False)
        )

    def _views(self, tensors: Any) -> SlotViews:
        views = SlotViews(tensors)
        views.storage = self
        return views

    def places(self, block: Block, whole: Tensor) -> Iterator[Place]:
        """Yield (S, slices, r, I) for A; for B (S, r, O) of all slices, or of each if the rank cuts them."""
        first, end = block.first_slice, block.first_slice + block.slices
        if block.side == "A":
            yield self.a_SMRI[:, first:end, : block.rank], whole[..., self.inputs.range]
            return
        if all(cut.width == cut.total for cut in self.outputs[first:end]):
            yield self.b_SRO[:, : block.rank, self._starts[first] : self._starts[end]], whole
            return
        for i, part in enumerate(whole.split(block.widths, dim=1), start=first):
            target = self.b_SRO[:, : block.rank, self._starts[i] : self._starts[i + 1]]
            yield target, part[:, self.outputs[i].range]


class StackedSlots(ModuleSlots):
    """vLLM's own tensors of one linear module: its Triton operations reject views (`_get_lora_a_ptr`).

    One A (S, 1, R, I) and one B (S, 1, O, R) for each slice.
    """

    def __init__(self, layer: BaseLinearLayerWithLoRA):
        self.a_stacked, self.b_stacked = layer.lora_a_stacked, layer.lora_b_stacked
        rank = self.a_stacked[0].shape[2]
        super().__init__(rank, self.a_stacked[0].dtype, *_linear_cuts(layer))

    def places(self, block: Block, whole: Tensor) -> Iterator[Place]:
        """Yield (S, r, I) of A, or rank-major (S, r, O) of B, for each slice of the block."""
        parts = whole if block.side == "A" else whole.split(block.widths, dim=1)
        for i, part in enumerate(parts, start=block.first_slice):
            if block.side == "A":
                yield self.a_stacked[i][:, 0, : block.rank], part[:, self.inputs.range]
            else:
                rank_major = self.b_stacked[i][:, 0].transpose(1, 2)
                yield rank_major[:, : block.rank], part[:, self.outputs[i].range]


class DroppedSlots(StackedSlots):
    """vLLM's own tensors of a module whose adapters its kernels ignore: every block is refused."""

    def __init__(self, layer: BaseLinearLayerWithLoRA, reason: str):
        super().__init__(layer)
        self.reason = reason

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str:
        """Return the reason why vLLM ignores adapters on this module."""
        return self.reason


class ExpertSlots(ModuleSlots):
    """Every slot of a projection of a layer's experts: A (S, E, M, R, I), B rank-major (S, E, M, R, O).

    `inputs` and `outputs` are this rank's of `tp` (rank, size): ranks cut the outputs of gate and up, and
    the inputs of down (`cut_inputs`).
    """

    def __init__(
        self,
        slots: int,
        experts: int,
        slices: int,
        rank: int,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        tp: tuple[int, int] = (0, 1),
        *,
        cut_inputs: bool = False,
    ):
        tp_rank, tp_size = tp
        split = Cut.of(
            inputs if cut_inputs else outputs, tp_rank, (inputs if cut_inputs else outputs) * tp_size
        )
        into, out = (split, Cut.whole(outputs)) if cut_inputs else (Cut.whole(inputs), split)
        super().__init__(rank, dtype, into, [out] * slices, experts)
        self.a_SEMRI = torch.zeros(slots, experts, slices, rank, inputs, dtype=dtype)
        self.b_SEMRO = torch.zeros(slots, experts, slices, rank, outputs, dtype=dtype)

    def places(self, block: Block, whole: Tensor) -> Iterator[Place]:
        """Yield the block's experts and slices of A (S, e, m, r, I) or B (S, e, m, r, O)."""
        experts = slice(block.first_expert, block.first_expert + block.experts)
        slices = slice(block.first_slice, block.first_slice + block.slices)
        target, cut = (self.a_SEMRI, self.inputs) if block.side == "A" else (self.b_SEMRO, self.outputs[0])
        yield target[:, experts, slices, : block.rank], whole[..., cut.range]


class StackedExperts(ModuleSlots):
    """A projection of vLLM's own expert tensors: one A (S, E, R, I) and one B (S, E, O, R) for each slice."""

    def __init__(
        self,
        a_stacked: Sequence[Tensor],
        b_stacked: Sequence[Tensor],
        inputs: Cut,
        output: Cut,
        enabled: Tensor,
    ):
        self.a_stacked, self.b_stacked, self.enabled = a_stacked, b_stacked, enabled
        _, experts, rank, _ = a_stacked[0].shape
        super().__init__(rank, a_stacked[0].dtype, inputs, [output] * len(b_stacked), experts)

    def places(self, block: Block, whole: Tensor) -> Iterator[Place]:
        """Yield (S, e, r, I) of A, or rank-major (S, e, r, O) of B, for each slice of the block."""
        experts = slice(block.first_expert, block.first_expert + block.experts)
        for i, part in enumerate(whole.unbind(1), start=block.first_slice):
            if block.side == "A":
                yield self.a_stacked[i][:, experts, : block.rank], part[..., self.inputs.range]
            else:
                rank_major = self.b_stacked[i][:, experts].transpose(2, 3)
                yield rank_major[:, :, : block.rank], part[..., self.outputs[i].range]


class FusedGateUp(ModuleSlots):
    """Gate and up of vLLM's 3-D experts, which share one A (S, E, R, I) and one B (S, E, 2 O, R).

    Gate and up have different factors, so each takes half of the rank: A is [A_gate; A_up] and B is
    block-diagonal. An adapter's rank is at most half of the engine's.
    """

    def __init__(self, a_SERI: Tensor, b_SEOR: Tensor, inputs: Cut, output: Cut, enabled: Tensor):
        self.a_SERI, self.b_SEOR, self.enabled = a_SERI, b_SEOR, enabled
        self.half = a_SERI.shape[2] // 2
        super().__init__(self.half, a_SERI.dtype, inputs, [output] * 2, a_SERI.shape[1])

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Return why a block does not fit this module, or None."""
        if block.rank > self.half:
            return (
                f"rank {block.rank} of gate and up needs {2 * block.rank} in this engine's fused experts, "
                f"and its maximum is {self.a_SERI.shape[2]}"
            )
        return super().unsupported_reason(block, dtype)

    def places(self, block: Block, whole: Tensor) -> Iterator[Place]:
        """Yield (S, e, r, I) of A, or rank-major (S, e, r, O) of B, for gate and up in their halves."""
        experts = slice(block.first_expert, block.first_expert + block.experts)
        width = self.outputs[0].width
        for i, part in enumerate(whole.unbind(1), start=block.first_slice):
            ranks = slice(i * self.half, i * self.half + block.rank)
            if block.side == "A":
                yield self.a_SERI[:, experts, ranks], part[..., self.inputs.range]
            else:
                rank_major = self.b_SEOR[:, experts, i * width : (i + 1) * width].transpose(2, 3)
                yield rank_major[:, :, ranks], part[..., self.outputs[i].range]


def slots_of(name: str, layer: Any) -> dict[str, ModuleSlots]:
    """Return the slots of one of vLLM's LoRA layers, by the name of the packed module."""
    if isinstance(layer, BaseLinearLayerWithLoRA):
        on_gpu = layer.lora_a_stacked[0].is_cuda
        dropped = DROPPED_ON_CUDA.get(name.rpartition(".")[2]) if on_gpu else None
        if dropped:
            return {name: DroppedSlots(layer, dropped)}
        return {name: StackedSlots(layer) if on_gpu else SlotBuffers(layer)}
    # On a CPU the layer is ours (moe_cpu.py) and has made its slots.
    if "gate_up" in vars(layer):
        return {f"{name}.gate_up_proj": layer.gate_up, f"{name}.down_proj": layer.down}
    return {f"{name}.gate_up_proj": _gate_up(layer), f"{name}.down_proj": _down(layer)}


def _gate_up(layer: FusedMoEWithLoRA) -> ModuleSlots:
    hidden = Cut.whole(layer.hidden_size)
    inner = _inner(layer)
    if isinstance(layer, FusedMoE3DWithLoRA):
        a_SERI, b_SEOR = layer.w13_lora_a_stacked[0], layer.w13_lora_b_stacked[0]
        return FusedGateUp(a_SERI, b_SEOR, hidden, inner, layer.adapter_enabled)
    return StackedExperts(
        layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, hidden, inner, layer.adapter_enabled
    )


def _down(layer: FusedMoEWithLoRA) -> ModuleSlots:
    hidden = Cut.whole(layer.hidden_size)
    return StackedExperts(
        layer.w2_lora_a_stacked, layer.w2_lora_b_stacked, _inner(layer), hidden, layer.adapter_enabled
    )


def _inner(layer: FusedMoEWithLoRA) -> Cut:
    width = layer.intermediate_size_per_partition
    return Cut.of(width, layer.tp_rank, width * layer.tp_size)


def _linear_cuts(layer: Any) -> tuple[Cut, list[Cut]]:
    """Return this rank's inputs, and its outputs of each slice, of a linear module."""
    inputs = layer.lora_a_stacked[0].shape[-1]
    widths = [b.shape[2] for b in layer.lora_b_stacked]
    if isinstance(layer, RowParallelLinearWithLoRA):
        total = layer.base_layer.input_size
        return Cut.of(inputs, layer.tp_rank, total), [Cut.whole(width) for width in widths]
    if isinstance(layer, MergedColumnParallelLinearWithLoRA):
        base: Any = layer.base_layer
        totals = base.output_sizes
        if isinstance(layer, MergedQKVParallelLinearWithLoRA):
            # With more ranks than key heads, vLLM's output_sizes count copies; a file has each head once.
            heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
            totals = [count * base.head_size for count in heads]
        cuts = zip(widths, layer.output_ids, totals, strict=True)
        return Cut.whole(inputs), [Cut.of(*cut) for cut in cuts]
    if isinstance(layer, ColumnParallelLinearWithLoRA):
        return Cut.whole(inputs), [Cut.of(widths[0], layer.tp_rank, layer.base_layer.output_size)]
    return Cut.whole(inputs), [Cut.whole(width) for width in widths]
