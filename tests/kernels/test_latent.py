"""LoRA on latent attention's up-projection in its absorbed form, and the heads' rotation on CPU."""

from typing import Any

import pytest
import torch

from kernels import latent
from kernels.dense import cpu as grouped
from tests.helpers.popularity import MIXES

HEADS, LATENT, PLAIN, VALUE, RANK, SLOTS = 3, 20, 5, 7, 4, 8


def factors():
    generator = torch.Generator().manual_seed(3)
    a_SRL = torch.randn(SLOTS, RANK, LATENT, generator=generator)
    b_SRO = torch.randn(SLOTS, RANK, HEADS * (PLAIN + VALUE), generator=generator)
    return a_SRL, b_SRO


@pytest.mark.parametrize("mix", MIXES)
def test_absorbed_factors_equal_the_layer_with_b_a_in_its_weight(mix: str):
    """Scores and values of the absorbed form, against keys and values that the layer makes itself."""
    slots = MIXES[mix]
    a_SRL, b_SRO = factors()
    for unused in set(range(SLOTS)) - set(slots):
        a_SRL[unused] = torch.nan
        b_SRO[unused] = torch.nan
    generator = torch.Generator().manual_seed(4)
    q_NHP = torch.randn(len(slots), HEADS, PLAIN, generator=generator)
    x_NHL = torch.randn(len(slots), HEADS, LATENT, generator=generator)
    latents_XL = torch.randn(6, LATENT, generator=generator)
    scores_NHX = torch.zeros(len(slots), HEADS, 6)
    values_NHV = torch.zeros(len(slots), HEADS, VALUE)
    for row, slot in enumerate(slots):
        if slot >= 0:
            weight_OL = b_SRO[slot].T @ a_SRL[slot]
            k_HPL, v_HVL = weight_OL.view(HEADS, PLAIN + VALUE, LATENT).split([PLAIN, VALUE], dim=1)
            keys_HXP = latents_XL @ k_HPL.transpose(1, 2)
            scores_NHX[row] = torch.einsum("hp,hxp->hx", q_NHP[row], keys_HXP)
            values_NHV[row] = torch.einsum("hl,hvl->hv", x_NHL[row], v_HVL)
    plan = grouped.plan(slots)
    assert plan is not None
    queries = torch.zeros(len(slots), HEADS, LATENT)
    latent.add_to_queries(queries, q_NHP, a_SRL, b_SRO, plan)
    got = torch.zeros_like(values_NHV)
    latent.add_to_values(got, x_NHL, a_SRL, b_SRO, plan)
    torch.testing.assert_close(queries @ latents_XL.T, scores_NHX, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, values_NHV, rtol=1e-4, atol=1e-4)
    assert scores_NHX.abs().max() > 1


def test_rows_without_an_adapter_are_untouched_bit_for_bit():
    slots = MIXES["with base rows"]
    a_SRL, b_SRO = factors()
    plan = grouped.plan(slots)
    assert plan is not None
    y_NHL, y_NHV = torch.randn(len(slots), HEADS, LATENT), torch.randn(len(slots), HEADS, VALUE)
    before = y_NHL.clone(), y_NHV.clone()
    latent.add_to_queries(y_NHL, torch.randn(len(slots), HEADS, PLAIN), a_SRL, b_SRO, plan)
    latent.add_to_values(y_NHV, torch.randn(len(slots), HEADS, LATENT), a_SRL, b_SRO, plan)
    base = torch.tensor([slot < 0 for slot in slots])
    for got, old in zip((y_NHL, y_NHV), before, strict=True):
        assert torch.equal(got[base], old[base])
        assert not torch.equal(got[~base], old[~base])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_product_is_the_same_in_any_batch(dtype: torch.dtype):
    x_NHD = torch.randn(40, 4, 32).to(dtype)
    weight_HDE = torch.randn(4, 32, 512).to(dtype)
    whole = latent.per_head(x_NHD, weight_HDE)
    want = torch.einsum("nhd,hde->nhe", x_NHD.double(), weight_HDE.double())
    torch.testing.assert_close(whole.double(), want, rtol=0, atol=0.1 if dtype == torch.bfloat16 else 1e-4)
    for start, count in ((0, 1), (7, 2), (11, 3), (2, 17), (39, 1)):
        part = latent.per_head(x_NHD[start : start + count], weight_HDE)
        assert torch.equal(part, whole[start : start + count])


def test_heads_are_rotated_by_their_own_tokens_position():
    """vLLM's kernel on the rank 3 that MLA gives it, patched, against the formula; stock is far off."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    from engine.serving.vllm_plugin.plugin import rotate_heads_on_cpu

    current_platform.import_kernels()
    rotate_heads_on_cpu()
    patched: Any = RotaryEmbedding.forward_cpu
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, max_position=64, is_neox_style=False, dtype=torch.float32)
    positions = torch.tensor([5, 0, 9, 9, 3])
    q_THD, fused = torch.randn(5, 4, 96), torch.randn(5, 24 + 64)

    def by_formula(values):
        angles = positions[:, None, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
        even, odd = values[..., 0::2], values[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()
        return torch.stack(turned, -1).flatten(-2)

    want = by_formula(q_THD[..., 32:]), by_formula(fused[:, None, 24:])
    stock = patched.__wrapped__(rope, positions, q_THD.clone()[..., 32:], fused.clone()[:, 24:].unsqueeze(1))
    got = patched(rope, positions, q_THD.clone()[..., 32:], fused.clone()[:, 24:].unsqueeze(1))
    for expected, ours, theirs in zip(want, got, stock, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        assert (theirs - expected).abs().max() > 0.5


def test_cuda_refuses_what_its_kernels_would_drop():
    """vLLM's own tensors stand for a GPU's; the sentence says why and what to do."""
    from engine.adapters.packed import pack
    from engine.base.families import DROPPED_ON_CUDA
    from engine.serving.worker.slots import DroppedSlots, StackedSlots
    from tests.helpers import vllm_layers as made

    layer = made.column(16, 24, made.lora_config(2, 8, torch.float32))
    tensors = {"kv_b_proj.lora_A": torch.ones(2, 16), "kv_b_proj.lora_B": torch.ones(24, 2)}
    block = pack(tensors, torch.float32, {}).layout.blocks[0]
    assert StackedSlots(layer).unsupported_reason(block, torch.float32) is None
    slots = DroppedSlots(layer, DROPPED_ON_CUDA["kv_b_proj"])
    assert "kv_b_proj" in slots.unsupported_reason(block, torch.float32)
