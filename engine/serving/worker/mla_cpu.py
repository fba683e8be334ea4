"""Latent attention (MLA) with adapters on CPU.

vLLM 0.32.0's attention keeps the `kv_b_proj` from before LoRA was added, so it drops adapters on it; here
prefill uses the wrapped layer, and decode adds the absorbed form of the factors.

Shapes: T tokens, N decode rows, H heads, L latent, P query part without position, V value.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.attention import MLAAttention

from engine.serving.worker.lora_cpu import GroupedPunica
from engine.serving.worker.slots import SlotViews
from kernels import latent


class LatentAttention(MLAAttention):
    """vLLM's latent attention on CPU, with adapters on `kv_b_proj`.

    `kv_b_proj` is vLLM's LoRA layer if it is a target. Prompts are computed whole: vLLM disables chunked
    prefill and the prefix cache for latent attention on CPU.
    """

    impl: Any
    kv_b_proj: Any
    W_UK_T: Tensor
    W_UV: Tensor

    def forward_impl(
        self,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Write the attention of q (T, H, P + rope) to `output` (T, H * V) and return it.

        The step's first rows are decode rows, the others prompts.
        """
        if attn_metadata is None:
            # vLLM's dry run, before the cache exists.
            return output.zero_()
        first, end = attn_metadata.num_decode_tokens, attn_metadata.num_actual_tokens
        if first < end:
            assert attn_metadata.prefill.chunked_context is None, "vLLM computes whole prompts on CPU"
            self.impl.kv_b_proj = self.kv_b_proj
            with self._only(first, end):
                self.impl.forward_mha(
                    q[first:end], k_c_normed[first:end], k_pe[first:end], kv_cache, attn_metadata,
                    self._k_scale, output=output[first:end],
                )  # fmt: skip
        if first:
            self._decode(q[:first], kv_cache, attn_metadata, output[:first])
        return output

    def _decode(self, q: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor) -> None:
        """Attend in the latent space, with the adapters' part of both absorbed weights."""
        q_NHP, rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        absorbed_NHL = latent.per_head(q_NHP, self.W_UK_T)
        self._add(latent.add_to_queries, absorbed_NHL, q_NHP)
        x_NHL, _ = self.impl.forward_mqa((absorbed_NHL, rope), kv_cache, attn_metadata, self)
        y_NHV = latent.per_head(x_NHL, self.W_UV)
        self._add(latent.add_to_values, y_NHV, x_NHL)
        output.copy_(y_NHV.flatten(1))

    def _add(self, operation: Callable[..., None], y: Tensor, x: Tensor) -> None:
        plan = self._operations.plan_of(0, len(y)) if self._operations else None
        if plan is None:
            return
        assert isinstance(self.kv_b_proj.lora_a_stacked, SlotViews), "a LoRA layer without our slot buffers"
        slots = self.kv_b_proj.lora_a_stacked.storage
        operation(y, x, slots.a_SMRI[:, 0], slots.b_SRO, plan)

    def _only(self, first: int, end: int) -> Any:
        return self._operations.only(first, end) if self._operations else nullcontext()

    @property
    def _operations(self) -> GroupedPunica | None:
        """The LoRA operations of `kv_b_proj`; None if it is not a target."""
        if not isinstance(self.kv_b_proj, BaseLinearLayerWithLoRA):
            return None
        assert isinstance(self.kv_b_proj.punica_wrapper, GroupedPunica)
        return self.kv_b_proj.punica_wrapper
