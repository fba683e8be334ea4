"""Grouped LoRA operations for vLLM on CPU.

They replace those of stock vLLM 0.32.0, which index slots with -1 for rows without an adapter, so that base
rows of a mixed batch get the last slot's adapter, and which gather a whole adapter for each row.

Shapes: T rows of a step, L rows with an adapter, H features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from engine.serving.worker.slots import SlotViews
from kernels.dense import cpu as grouped


@dataclass(frozen=True)
class Split:
    """A step's rows divided by whether they have an adapter; all tensors are int64.

    `tokens` (L,) are the rows with an adapter (None: all rows), `slots` (L,) their slots, and `base` (T - L,)
    the other rows (None: there are none).
    """

    tokens: Tensor | None
    slots: Tensor
    base: Tensor | None

    def take(self, values: Tensor) -> Tensor:
        """Return the rows (L, ...) of `values` (T, ...) that have an adapter."""
        return values if self.tokens is None else values[self.tokens]


def split(slots: Sequence[int], idle: frozenset[int]) -> Split | None:
    """Divide rows by whether their slot is >= 0 and not in `idle`; None when no row has an adapter."""
    slots_T = torch.tensor([-1 if slot in idle else slot for slot in slots])
    has = slots_T >= 0
    if not has.any():
        return None
    if has.all():
        return Split(None, slots_T, None)
    tokens = has.nonzero()[:, 0]
    return Split(tokens, slots_T[tokens], has.logical_not().nonzero()[:, 0])


class GroupedPunica(PunicaWrapperCPU):
    """vLLM's CPU wrapper with grouped operations: rows are grouped by slot once a step, for all layers."""

    plan: grouped.TilePlan | None = None
    slots: Sequence[int] = ()
    # The adapter id in each slot that the step uses.
    occupants: Mapping[int, int] = {}

    def split(self, idle: frozenset[int]) -> Split | None:
        """Divide the step's rows for a layer on which the adapters in `idle` slots have no effect; cached."""
        if idle not in self._splits:
            self._splits[idle] = split(self.slots, idle)
        return self._splits[idle]

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Plan a step: slots of its rows and their groups. vLLM calls it when the adapters change."""
        slot_of = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        self.slots = [slot_of[i] if i > 0 else -1 for i in mapping.index_mapping]
        self.plan = grouped.plan(self.slots)
        self.occupants = {slot_of[i]: i for i in set(mapping.index_mapping) if i > 0}
        self._splits: dict[frozenset[int], Split | None] = {}
        self._parts: dict[tuple[int, int], grouped.TilePlan | None] = {}

    def plan_of(self, first: int, end: int) -> grouped.TilePlan | None:
        """Return the plan of the rows from `first` to `end`; made once a step."""
        if (first, end) not in self._parts:
            self._parts[first, end] = grouped.plan(self.slots[first:end])
        return self._parts[first, end]

    @contextmanager
    def only(self, first: int, end: int) -> Iterator[None]:
        """Limit linear layers in this context to the rows from `first` to `end` as their whole input."""
        whole, self.plan = self.plan, self.plan_of(first, end)
        try:
            yield
        finally:
            self.plan = whole

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add each row's LoRA product to y (T, sum of `output_slices`) in place, for x (T, H)."""
        if self.plan is None:
            return
        assert isinstance(lora_a_stacked, SlotViews), "a LoRA layer without our slot buffers"
        assert scale == 1.0, "scaling is folded into the adapter at export"
        slots = lora_a_stacked.storage
        grouped.add_lora(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            slots.a_SMRI,
            slots.b_SRO,
            slots.widths,
            self.plan,
        )

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> None:
        """Raise `NotImplementedError`: the embedding is never a target."""
        raise NotImplementedError("LoRA on embeddings is not supported; --lora-target-modules excludes them")

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        """Raise `NotImplementedError`: the language model head is never a target."""
        raise NotImplementedError("LoRA on the head is not supported; --lora-target-modules excludes it")
