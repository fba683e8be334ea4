"""Packed adapters: exact inverse, slot layout, and a container that other tools open."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from engine.adapters import packed
from engine.base.families import BaseShapes
from engine.errors import AdapterError
from tests.helpers.packed_files import read_packed

CONFIG = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 80, "num_hidden_layers": 2,
}  # fmt: skip
SHAPES = BaseShapes.of({"model_type": "qwen3", **CONFIG})


def adapter(names: set[str], rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (inputs, outputs) in SHAPES.modules().items():
        if module.rpartition(".")[2] in names:
            tensors[f"{module}.lora_A"] = torch.randn(rank, inputs, generator=generator)
            tensors[f"{module}.lora_B"] = torch.randn(outputs, rank, generator=generator)
    return tensors


LEAVES = SHAPES.targets


@given(names=st.sets(st.sampled_from(LEAVES), min_size=1), rank=st.sampled_from([1, 3, 8]))
def test_unpack_is_the_exact_inverse(names: set[str], rank: int):
    tensors = adapter(names, rank)
    back = packed.unpack(packed.pack(tensors, torch.float32, SHAPES.fused))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)


def test_blocks_hold_the_fused_product():
    """Route two: x through the blocks equals x through each projection's own B @ A."""
    tensors = adapter({"q_proj", "k_proj", "v_proj"}, rank=4)
    whole = packed.pack(tensors, torch.float32, SHAPES.fused)
    a, b = (whole.block(block) for block in whole.layout.blocks[:2])
    x = torch.randn(5, 48)
    start = 0
    for i, leaf in enumerate(("q_proj", "k_proj", "v_proj")):
        name = f"model.layers.0.self_attn.{leaf}"
        want = x @ (tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]).T
        got = (x @ a[i].T) @ b[:, start : start + want.shape[1]]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert want.abs().max() > 1
        start += want.shape[1]


def test_a_hole_in_the_slices_splits_the_run():
    layout = packed.pack(adapter({"q_proj", "v_proj"}, rank=2), torch.float32, SHAPES.fused).layout
    first = [
        (b.first_slice, b.slices) for b in layout.blocks if b.module == "model.layers.0.self_attn.qkv_proj"
    ]
    assert first == [(0, 1), (0, 1), (2, 1), (2, 1)]


def test_adapters_of_one_shape_share_a_layout():
    one, two = (packed.pack(adapter({"q_proj"}, 4, seed), torch.float32, SHAPES.fused) for seed in (1, 2))
    assert one.layout.digest == two.layout.digest
    assert packed.PackedLayout.from_json(one.layout.to_json()) == one.layout
    assert packed.pack(adapter({"q_proj"}, 8), torch.float32, SHAPES.fused).layout.digest != one.layout.digest


def test_the_file_is_a_safetensors_container(tmp_path):
    tensors = adapter({"q_proj", "gate_proj", "up_proj", "down_proj"}, rank=3)
    whole = packed.pack(tensors, torch.bfloat16, SHAPES.fused)
    path = tmp_path / "one.safetensors"
    packed.write_file(whole, path, {"digest": "d" * 64})
    with safe_open(path, "pt") as file:
        assert file.metadata()["digest"] == "d" * 64
        got = file.get_tensor("model.layers.0.mlp.gate_up_proj.0.A")
    assert torch.equal(got[1], tensors["model.layers.0.mlp.up_proj.lora_A"].bfloat16())
    again = read_packed(path)
    assert again.layout == whole.layout
    assert torch.equal(again.payload, whole.payload)


def test_a_truncated_file_is_refused_by_whoever_opens_it(tmp_path):
    path = tmp_path / "one.safetensors"
    packed.write_file(packed.pack(adapter({"q_proj"}, 2), torch.float32, SHAPES.fused), path, {})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SafetensorError):
        read_packed(path)


def test_faults_name_the_tensor():
    tensors = adapter({"q_proj"}, 2)
    del tensors["model.layers.1.self_attn.q_proj.lora_B"]
    with pytest.raises(AdapterError, match=r"model\.layers\.1\.self_attn\.q_proj\W+lora_B"):
        packed.pack(tensors, torch.float32, SHAPES.fused)
    tensors["model.layers.1.self_attn.q_proj.lora_B"] = torch.zeros(64, 3)
    with pytest.raises(AdapterError, match=r"\(64, 3\)"):
        packed.pack(tensors, torch.float32, SHAPES.fused)


MOE = BaseShapes.of(
    {
        "model_type": "deepseek_v3", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
        "q_lora_rank": 20, "intermediate_size": 80, "moe_intermediate_size": 28, "n_routed_experts": 6,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    }
)  # fmt: skip


def experts_adapter(ranks: dict[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, rank in ranks.items():
        inputs, outputs = MOE.modules()[module]
        tensors[f"{module}.lora_A"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{module}.lora_B"] = torch.randn(outputs, rank, generator=generator)
    return tensors


@given(data=st.data())
def test_experts_of_any_ranks_and_holes_come_back(data):
    chosen = data.draw(st.sets(st.sampled_from(sorted(MOE.modules())), min_size=1))
    ranks = {module: data.draw(st.sampled_from([1, 2, 4])) for module in sorted(chosen)}
    tensors = experts_adapter(ranks)
    back = packed.unpack(packed.pack(tensors, torch.float32, MOE.fused))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)


def test_all_experts_of_a_layer_are_two_blocks_a_module():
    tensors = experts_adapter(dict.fromkeys(MOE.modules(), 2))
    layout = packed.pack(tensors, torch.bfloat16, MOE.fused).layout
    routed = [block for block in layout.blocks if block.experts]
    assert [(b.module.split(".", 3)[3], b.side, b.shape) for b in routed[:4]] == [
        ("mlp.experts.down_proj", "A", (6, 1, 2, 28)),
        ("mlp.experts.down_proj", "B", (6, 1, 2, 48)),
        ("mlp.experts.gate_up_proj", "A", (6, 2, 2, 48)),
        ("mlp.experts.gate_up_proj", "B", (6, 2, 2, 28)),
    ]
    assert len(routed) == 8
    modules = {block.module.rpartition(".")[2] for block in layout.blocks}
    assert modules == {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert packed.PackedLayout.from_json(layout.to_json()) == layout


def test_latent_attention_without_a_narrow_query_fuses_nothing():
    config = {
        "model_type": "deepseek_v3", "hidden_size": 48, "num_attention_heads": 4, "kv_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "q_lora_rank": None,
        "intermediate_size": 80, "num_hidden_layers": 1,
    }  # fmt: skip
    assert set(BaseShapes.of(config).fused) == {"gate_up_proj"}
