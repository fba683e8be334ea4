"""vLLM's LoRA operations on CPU, replaced by the grouped ones.

Stock vLLM 0.32.0 indexes slots with -1 for rows without an adapter, which gives base rows of a
mixed batch the last slot's adapter, and gathers a whole adapter for each row.
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
    """A step's rows with an adapter, and the others.

    `tokens` (L) are rows with an adapter (None: all rows) and `slots` (L) their slots; `base` are the
    other rows (None: there are none).
    """

    tokens: Tensor | None
    slots: Tensor
    base: Tensor | None

    def take(self, values: Tensor) -> Tensor:
        """Return the rows with an adapter."""
        return values if self.tokens is None else values[self.tokens]


def split(slots: Sequence[int], idle: frozenset[int]) -> Split | None:
    """Part rows by whether they have an adapter (slot >= 0) that is not `idle`. None when no row has one."""
    slots_T = torch.tensor([-1 if slot in idle else slot for slot in slots])
    has = slots_T >= 0
    if not has.any():
        return None
    if has.all():
        return Split(None, slots_T, None)
    tokens = has.nonzero()[:, 0]
    return Split(tokens, slots_T[tokens], has.logical_not().nonzero()[:, 0])


class GroupedPunica(PunicaWrapperCPU):
    """Group the step's rows by slot once; every layer then uses the same plan."""

    _plan: grouped.TilePlan | None = None
    _slots: Sequence[int] = ()
    # The adapter of each slot that the step uses, by vLLM's id.
    occupants: Mapping[int, int] = {}

    def split(self, idle: frozenset[int]) -> Split | None:
        """Part the step's rows for a layer that the adapters in `idle` slots leave alone."""
        if idle not in self._splits:
            self._splits[idle] = split(self._slots, idle)
        return self._splits[idle]

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        slot_of = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        self._slots = [slot_of[i] if i > 0 else -1 for i in mapping.index_mapping]
        self._plan = grouped.plan(self._slots)
        self.occupants = {slot_of[i]: i for i in set(mapping.index_mapping) if i > 0}
        self._splits: dict[frozenset[int], Split | None] = {}
        self._parts: dict[tuple[int, int], grouped.TilePlan | None] = {}

    def plan_of(self, first: int, end: int) -> grouped.TilePlan | None:
        """Return the plan of some of the step's rows, made once a step."""
        if (first, end) not in self._parts:
            self._parts[first, end] = grouped.plan(self._slots[first:end])
        return self._parts[first, end]

    @contextmanager
    def only(self, first: int, end: int) -> Iterator[None]:
        """Make linear layers within see some of the step's rows as the whole step."""
        whole, self._plan = self._plan, self.plan_of(first, end)
        try:
            yield
        finally:
            self._plan = whole

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
        if self._plan is None:
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
            self._plan,
        )

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("embeddings carry no LoRA here; --lora-target-modules leaves them out")

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the head carries no LoRA here; --lora-target-modules leaves it out")
