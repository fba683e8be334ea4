"""Latent attention (MLA) on CPU with adapters, which vLLM 0.32.0 serves wrong in two ways.

Its rotary kernel misreads the heads' rank-3 tensors; `rotate` gives it the rank 2 that it expects. And its
attention keeps `kv_b_proj` as it was before adapters came, so their part of it is dropped; here prefill
takes the wrapped layer, and decode adds the absorbed form of the factors.

Shapes: T tokens, N decode rows, H heads, L latent, P query part without position, V value.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from engine.serving.worker.lora_cpu import GroupedPunica
from engine.serving.worker.slots import SlotViews
from kernels import latent

stock_rotate = RotaryEmbedding.forward_cpu


def rotate(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate (T, H * size), or (T, H, size); a query that is a slice of heads comes back as a copy."""
    if query.dim() != 3:
        return stock_rotate(self, positions, query, key)
    flat_key = None if key is None else key.flatten(1)
    rotated, rotated_key = stock_rotate(self, positions, query.flatten(1), flat_key)
    if key is None or rotated_key is None:
        return rotated.view(query.shape), None
    return rotated.view(query.shape), rotated_key.view(key.shape)


class LatentAttention(MLAAttention):
    """vLLM's latent attention on CPU, with the adapters of `kv_b_proj`.

    `kv_b_proj` is vLLM's LoRA layer where the engine takes adapters on it. Prompts are computed whole:
    vLLM switches chunked prefill and the prefix cache off.
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
        """Attend; the step's first rows decode, the others are prompts. Writes `output` (T, H * V)."""
        if attn_metadata is None:
            # A dry run of vLLM's, before there is a cache.
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
        """Attend in the space of latents, with the adapters' part of both absorbed weights."""
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
        """Return the LoRA operations of `kv_b_proj`; None without adapters on it."""
        if not isinstance(self.kv_b_proj, BaseLinearLayerWithLoRA):
            return None
        assert isinstance(self.kv_b_proj.punica_wrapper, GroupedPunica)
        return self.kv_b_proj.punica_wrapper
