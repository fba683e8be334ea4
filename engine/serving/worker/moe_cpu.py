"""LoRA on a mixture of experts on CPU: a LoRA layer over our slots, and experts that apply it.

Stock vLLM 0.32.0 selects Triton for a MoE with LoRA even on CPU and crashes at the first token. Here rows
without an adapter, or whose adapter has no effect on this layer's experts, go through vLLM's fused CPU
kernel. It computes each row independently, so their bits equal those of a step without adapters. Rows with an
adapter need intermediate values that the kernel does not expose (before the activation, and before the sum
over experts). Its weights are packed for it alone, so a second, plain copy of them serves these rows.

Shapes: T tokens, L tokens with an adapter, K experts of a token, P = L * K pairs, H hidden, I inner
(padded to J for the kernel), M slices (gate and up), S slots, E experts, R rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    ArmCPUUnquantizedExperts,
    CPUUnquantizedExperts,
    X86CPUUnquantizedExperts,
)
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    select_unquantized_moe_backend as stock_select,
)
from vllm.model_executor.utils import replace_parameter

from engine.serving.worker.lora_cpu import GroupedPunica
from engine.serving.worker.slots import ExpertSlots
from kernels import routed
from kernels.experts import cpu as lora


@dataclass
class ExpertsContext:
    """What a layer's experts read; vLLM's modular kernel also stores a step's hidden states in it."""

    gate_up: ExpertSlots
    down: ExpertSlots
    punica: GroupedPunica
    original_hidden_states: Tensor | None = None
    _occupants: Mapping[int, int] = field(default_factory=dict)
    _idle: frozenset[int] = frozenset()

    def idle(self) -> frozenset[int]:
        """Return the step's slots whose adapters have no effect on this layer's experts: B is zero."""
        occupants = self.punica.occupants
        if occupants != self._occupants:
            known = self._occupants.items()
            unchanged = {slot for slot, adapter in known if occupants.get(slot) == adapter}
            new = {slot for slot in occupants.keys() - unchanged if not self._has_effect(slot)}
            self._idle = frozenset(self._idle & unchanged | new)
            self._occupants = occupants
        return self._idle

    def _has_effect(self, slot: int) -> bool:
        # The first expert nearly always decides, and reading all of them is slow.
        factors = (self.down.b_SEMRO[slot], self.gate_up.b_SEMRO[slot])
        return any(bool(b[:1].any()) for b in factors) or any(bool(b.any()) for b in factors)


class ExpertsWithLoRA(FusedMoEWithLoRA):
    """vLLM's MoE LoRA layer over our slots, for per-expert and fused (3-D) checkpoints.

    Stock keeps a view for each slot and expert: millions at 48 layers of 128 experts.
    """

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """Allocate the slots of gate, up and down: zeros in the engine's LoRA dtype."""
        count, hidden, inner = self.local_num_experts, self.hidden_size, self.intermediate_size_per_partition
        rank, dtype = lora_config.max_lora_rank, lora_config.lora_dtype
        slices, tp = self._w13_slices, (self.tp_rank, self.tp_size)
        self.gate_up = ExpertSlots(max_loras, count, slices, rank, hidden, inner, dtype, tp)
        self.down = ExpertSlots(max_loras, count, 1, rank, inner, hidden, dtype, tp, cut_inputs=True)

    def set_mapping(self, punica_wrapper: Any) -> None:
        """Connect this layer's experts with its slots and with the step's rows."""
        self.punica_wrapper = punica_wrapper
        context: Any = ExpertsContext(self.gate_up, self.down, punica_wrapper)
        self._moe_kernel.fused_experts.set_lora_context(context)  # type: ignore[attr-defined]

    @classmethod
    def can_replace_layer(cls, source_layer: Any, *args: Any, **kwargs: Any) -> bool:
        """Return whether vLLM should wrap `source_layer` with this class: any MoE layer."""
        return isinstance(source_layer, MoERunner)


class _AddLoRA(LoRAExpertsMixin):
    """Mixed into vLLM's CPU experts: rows with an adapter bypass the fused kernel."""

    moe_config: Any
    quant_config: Any
    w1_bias: Tensor | None
    w2_bias: Tensor | None
    isa: str
    _pad_moe_intermediate: Any

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_ep

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the plain weights, padded as the kernel needs them, besides the packed ones."""
        self._pad_moe_intermediate(layer)
        self.w13_EOH, self.w2_EHJ = layer.w13_weight.data, layer.w2_weight.data
        for name in ("w13_weight", "w2_weight"):
            replace_parameter(layer, name, cpu_prepack_moe_weight(getattr(layer, name), self.isa))

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write the experts' sum to output (T, H) for hidden_states (T, H) and topk_ids (T, K)."""
        context: Any = self._lora_context
        split = context.punica.split(context.idle()) if context is not None else None
        apply_base: Any = super().apply  # type: ignore[misc]
        if split is None:
            apply_base(output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *args, **kwargs)
            return
        if split.base is not None:
            x, weights, ids = (v[split.base] for v in (hidden_states, topk_weights, topk_ids))
            result = torch.empty_like(x)
            apply_base(result, x, w1, w2, weights, ids, activation, *args, **kwargs)
            output[split.base] = result
        x, weights, ids = (split.take(v) for v in (hidden_states, topk_weights, topk_ids))
        result = self._apply_lora(context, split.slots, x, weights, ids.long(), activation)
        if split.tokens is None:
            output.copy_(result)
        else:
            output[split.tokens] = result

    def _apply_lora(
        self,
        context: ExpertsContext,
        slots_L: Tensor,
        x_LH: Tensor,
        weights_LK: Tensor,
        ids_LK: Tensor,
        activation: MoEActivation,
    ) -> Tensor:
        """Return (L, H) in x's dtype: the weighted sum over each token's experts."""
        groups, plan = routed.group(ids_LK, len(self.w13_EOH)), lora.RoutingPlan(None, slots_L, ids_LK)
        y_PO = groups.product(x_LH, self.w13_EOH, self.w1_bias)
        self._add_gate_up(y_PO, x_LH, context.gate_up, plan, activation)
        inner_PJ = y_PO.new_empty(len(y_PO), y_PO.shape[1] // 2)
        settings = ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
        apply_moe_activation(activation, inner_PJ, y_PO, activation_config=settings)
        z_PH = groups.product(inner_PJ, self.w2_EHJ, self.w2_bias)
        sum_LH = torch.einsum("lkh,lk->lh", z_PH.view(*ids_LK.shape, -1).float(), weights_LK.float())
        down = context.down
        inner_LKI = inner_PJ.view(*ids_LK.shape, -1)[..., : down.a_SEMRI.shape[-1]]
        h_LKR = lora.shrink(inner_LKI, down.a_SEMRI[:, :, 0], plan)
        lora.expand(sum_LH, h_LKR, down.b_SEMRO[:, :, 0], plan, weights_LK)
        return sum_LH.to(x_LH.dtype)

    def _add_gate_up(
        self,
        y_PO: Tensor,
        x_LH: Tensor,
        slots: ExpertSlots,
        plan: lora.RoutingPlan,
        activation: MoEActivation,
    ) -> None:
        """Add the LoRA products of gate and up to y (P, 2 J) in place: one shrink and one expand for both."""
        _, _, slices, rank, inner = slots.b_SEMRO.shape
        pairs = plan.experts.shape
        if activation == MoEActivation.SWIGLUOAI:
            y_LKMI = y_PO.view(*pairs, -1, slices).transpose(2, 3)
        else:
            y_LKMI = y_PO.view(*pairs, slices, -1)[..., :inner]
        h_LKX = lora.shrink(x_LH, slots.a_SEMRI.flatten(2, 3), plan)
        each_slice = (plan.experts[..., None] * slices + torch.arange(slices)).flatten(1)
        by_slice = lora.RoutingPlan(None, plan.slots, each_slice)
        lora.expand(y_LKMI, h_LKX.reshape(len(x_LH), -1, rank), slots.b_SEMRO.flatten(1, 2), by_slice)


class CPUExpertsWithLoRA(_AddLoRA, CPUUnquantizedExperts):  # type: ignore[misc]
    """vLLM's experts for any CPU, with LoRA."""


class X86ExpertsWithLoRA(_AddLoRA, X86CPUUnquantizedExperts):  # type: ignore[misc]
    """vLLM's experts for x86 with AMX, with LoRA."""


class ArmExpertsWithLoRA(_AddLoRA, ArmCPUUnquantizedExperts):  # type: ignore[misc]
    """vLLM's experts for Arm, with LoRA."""


WITH_LORA = (X86ExpertsWithLoRA, ArmExpertsWithLoRA, CPUExpertsWithLoRA)


def select_backend(moe_config: Any) -> tuple[Any, Any]:
    """Return the backend and class of a layer's experts: vLLM's choice, or ours if the engine has LoRA.

    Raises `ValueError` when none of ours supports this base.
    """
    if not moe_config.is_lora_enabled:
        return stock_select(moe_config)
    reasons = []
    for experts_cls in WITH_LORA:
        supported, reason = experts_cls.is_supported_config(
            experts_cls, moe_config, None, None, FusedMoEActivationFormat.Standard
        )
        if supported:
            return UnquantizedMoeBackend.CPU, experts_cls
        reasons.append(f"{experts_cls.__name__}: {reason}")
    raise ValueError(
        f"LoRA on this base's experts is not supported on this CPU: {'; '.join(reasons)}. Use another base."
    )
