"""Layouts: one adapter has one digest in all of them, and `peft` computes with what we write."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.adapters import revision
from engine.adapters.layouts import LAYOUTS
from engine.adapters.module_patterns import Patterns
from engine.base.families import FAMILIES, BaseShapes
from engine.errors import AdapterError
from engine.publishing.foreign import read_adapter
from tests.helpers.layout_writer import from_canonical
from tests.helpers.made_adapters import CONFIGS, canonical, groups, save, shapes, spread, write
from tests.helpers.parity import merge

# peft 0.21 says this of every pattern for a parameter, and then uses it.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
BASE = "b" * 64
SHARING = {layout.name for layout in LAYOUTS if layout.broadcast}
ROUTED = [name for name in CONFIGS if shapes(name).experts]


def digest_of(tensors):
    modules = {key.rpartition(".")[0] for key in tensors}
    rank = max(tensors[f"{module}.lora_A"].shape[0] for module in modules)
    return revision.digest(tensors, rank, {module.rpartition(".")[2] for module in modules}, BASE)


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_an_adapter_has_one_digest_in_every_layout(tmp_path, data):
    base = shapes(data.draw(st.sampled_from(ROUTED), label="family"))
    share, one_A = data.draw(st.booleans(), label="shared outer"), data.draw(st.booleans(), label="one A")
    ranks = {group: data.draw(st.integers(0, 4), label=group) for group in groups(base)}
    # Something routed must be there, else no layout shows.
    ranks |= {f"{parent}.down_proj": max(1, ranks[f"{parent}.down_proj"]) for parent in base.experts}
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype")
    seed, zero = data.draw(st.integers(0, 99), label="seed"), data.draw(st.booleans(), label="zero B")
    tensors = canonical(base, ranks=spread(ranks), share=share, one_A=one_A, seed=seed, dtype=dtype)
    if zero:
        tensors |= {key: torch.zeros_like(value) for key, value in tensors.items() if "lora_B" in key}
    for layout in LAYOUTS:
        # Zeros are shared by all experts; a random A is not.
        if not layout.broadcast or share:
            scale = data.draw(st.sampled_from([1.0, 0.5, 4.0]), label=f"scale of {layout.name}")
            found = read_adapter(write(tmp_path / layout.name, tensors, layout.name, base, scale), base)
            assert found.found.layout == layout.name
            assert found.digest(BASE) == digest_of(tensors)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_each_family_has_a_row_and_its_shapes_are_those_of_transformers(model_type):
    assert [family for family in FAMILIES if model_type in family.model_types]
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **CONFIGS[model_type], vocab_size=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = dict(model.named_parameters())
    base = BaseShapes.of(config.to_dict())
    for module, (size_in, size_out) in base.linear.items():
        assert found[f"{module}.weight"].shape == (size_out, size_in)
    for parent, experts in base.experts.items():
        for name in ("gate_up_proj", "down_proj"):
            size_in, size_out = experts.size(name)
            size = (size_in, size_out) if model_type == "gpt_oss" else (size_out, size_in)
            assert found[f"{parent}.{name}"].shape == (experts.count, *size)
    linear = {
        name.removesuffix(".weight")
        for name, value in found.items()
        if value.ndim == 2 and "bias" not in name
    }
    routers = {name for name in linear if name.endswith((".gate", ".router"))}
    assert linear - routers - {"model.embed_tokens", "lm_head"} == set(base.linear)


def test_a_fused_b_is_rank_major_and_an_a_expert_major(tmp_path):
    """The elements' order by hand: row e * R + r of A, column r * E + e of B."""
    base = shapes("qwen3_moe")
    parent, count, rank = "model.layers.0.mlp.experts", 3, 2
    A, B = torch.randn(count * rank, 7), torch.randn(8, rank * count)
    name = f"base_model.model.{parent}"
    save(
        tmp_path,
        {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B},
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank},
    )
    tensors = read_adapter(tmp_path, base).tensors
    for e in range(count):
        for r in range(rank):
            assert torch.equal(tensors[f"{parent}.{e}.down_proj.lora_A"][r], A[e * rank + r])
            assert torch.equal(tensors[f"{parent}.{e}.down_proj.lora_B"][:, r], B[:, r * count + e])


def test_gate_and_up_are_told_apart_concatenated_and_interleaved(tmp_path):
    for model_type, gate_rows in (("qwen3_moe", slice(0, 7)), ("gpt_oss", slice(0, None, 2))):
        base = shapes(model_type)
        parent = "model.layers.0.mlp.experts"
        B = torch.randn(3, 2 * base.experts[parent].inner, 3)
        file = {f"{parent}.gate_up_proj.lora_A": torch.randn(3, 3, 8), f"{parent}.gate_up_proj.lora_B": B}
        save(tmp_path / model_type, file, {"peft_type": "LORA", "r": 3, "lora_alpha": 3})
        tensors = read_adapter(tmp_path / model_type, base).tensors
        assert torch.equal(tensors[f"{parent}.1.gate_proj.lora_B"], B[1, gate_rows])
        assert not torch.equal(tensors[f"{parent}.1.up_proj.lora_B"], B[1, gate_rows])


def test_an_adapter_is_converted_to_the_dtype_that_serves(tmp_path):
    base = shapes("deepseek_v3")
    tensors = canonical(base)
    write(tmp_path / "a", tensors, "per-expert", base, 8.0)
    write(tmp_path / "b", tensors, "peft-fused", base)
    one, other = (read_adapter(tmp_path / name, base, torch.bfloat16) for name in "ab")
    assert one.digest(BASE) == other.digest(BASE)
    assert {tensor.dtype for tensor in one.tensors.values()} == {torch.bfloat16}
    assert one.found.shared_experts


def test_what_a_layout_cannot_hold_is_refused():
    base = shapes("qwen3_moe")
    tensors = canonical(base)
    with pytest.raises(AdapterError, match="share no factor"):
        from_canonical(tensors, "shared-outer", base)
    some = {key: value for key, value in tensors.items() if ".experts.1." not in key}
    with pytest.raises(AdapterError, match="2 of 3"):
        from_canonical(some, "peft-fused", base)
    from_canonical(some, "per-expert", base)


def test_patterns_cover_the_end_of_a_path_as_pefts_do():
    from peft.utils.other import get_pattern_key

    names = [
        "q_proj",
        r".*\.experts.gate_up_proj",
        "^model.layers.1.mlp.up_proj",
        "layers.0.*.k_proj",
        "a.*b.*c",
    ]
    patterns = Patterns({name: name for name in names})
    for module in (
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.xq_proj",
        "model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj",
        "model.layers.2.mlp.experts.gate_up_proj", "model.layers.1.mlp.up_proj",
        "x.model.layers.1.mlp.up_proj", "x.abc", "x.acb", "a.b.c", "ab", "abcd", "aabbcc",
    ):  # fmt: skip
        assert patterns.get(module, module) == get_pattern_key(names, module), module


# Through peft


def model_of(config_class, model_class, model_type, **more):
    torch.manual_seed(0)
    config = config_class(**CONFIGS[model_type], vocab_size=16, **more)
    # The grouped product wants strides of 16 bytes.
    config._experts_implementation = "eager"
    return model_class(config).eval(), BaseShapes.of(config.to_dict())


def qwen3_moe():
    return model_of(Qwen3MoeConfig, Qwen3MoeForCausalLM, "qwen3_moe", num_experts_per_tok=2)


def deepseek_v3():
    more = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 2}
    return model_of(DeepseekV3Config, DeepseekV3ForCausalLM, "deepseek_v3", **more)


def gpt_oss():
    return model_of(GptOssConfig, GptOssForCausalLM, "gpt_oss", num_experts_per_tok=2)


def qwen3():
    return model_of(Qwen3Config, Qwen3ForCausalLM, "qwen3")


TOKENS = torch.arange(12).reshape(2, 6)


def peft_saves(make, directory, **config):
    """Let peft write a random adapter; returns what it computes."""
    model, base = make()
    wrapped = get_peft_model(model, LoraConfig(**config))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(directory)
    return wrapped.eval()(TOKENS).logits.detach(), base


def peft_opens(make, directory):
    model, _ = make()
    before = model(TOKENS).logits.detach()
    after = PeftModel.from_pretrained(model, str(directory)).eval()(TOKENS).logits.detach()
    assert not torch.allclose(before, after, atol=1e-3)
    return after


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("make", "layout", "config"),
    [
        (qwen3, "plain", {"target_modules": ["q_proj", "up_proj"], "r": 4, "lora_alpha": 8}),
        (qwen3, "plain", {"target_modules": ["k_proj", "down_proj"], "r": 4, "rank_pattern": {"k_proj": 2}}),
        (qwen3_moe, "peft-fused", {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "r": 2}),
        (qwen3_moe, "peft-fused", {"target_modules": [], "target_parameters": EXPERTS[:1], "r": 3}),
        (qwen3_moe, "per-expert", {"target_modules": ["o_proj"], "target_parameters": EXPERTS, "r": 2}),
        (qwen3_moe, "peft-fused", {"target_modules": ["gate_proj", "up_proj", "down_proj"], "r": 2}),
        (deepseek_v3, "peft-fused", {"target_modules": ["kv_b_proj"], "target_parameters": EXPERTS, "r": 2}),
        (gpt_oss, "peft-fused", {"target_modules": ["v_proj"], "target_parameters": EXPERTS, "r": 2}),
    ],
)
def test_peft_computes_the_same_with_what_it_wrote_and_what_we_write_back(tmp_path, make, layout, config):
    expected, base = peft_saves(make, tmp_path / "theirs", **config)
    torch.testing.assert_close(peft_opens(make, tmp_path / "theirs"), expected)
    found = read_adapter(tmp_path / "theirs", base)
    write(tmp_path / "ours", found.tensors, layout, base)
    assert read_adapter(tmp_path / "ours", base).digest(BASE) == found.digest(BASE)
    torch.testing.assert_close(peft_opens(make, tmp_path / "ours"), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [qwen3_moe, deepseek_v3])
def test_peft_computes_the_same_per_expert_fused_and_by_hand(tmp_path, make):
    """Three routes: peft's own conversion of per-expert files, our fused file, and B @ A added by hand."""
    model, base = make()
    tensors = canonical(base)
    merge(model, tensors)
    expected = model(TOKENS).logits.detach()
    for layout in ("per-expert", "peft-fused"):
        write(tmp_path / layout, tensors, layout, base)
        torch.testing.assert_close(peft_opens(make, tmp_path / layout), expected, atol=1e-4, rtol=1e-4)


def test_a_revision_with_ranks_by_module_is_opened_by_peft(tmp_path):
    model, base = qwen3()
    ranks = {module: 1 + i % 3 for i, module in enumerate(base.linear)}
    tensors = canonical(base, ranks=ranks)
    targets = tuple({key.rsplit(".", 2)[1] for key in tensors})
    manifest = revision.make_manifest(tensors, policy="p", base_digest=BASE, rank=3, targets=targets, step=0)
    path = revision.write_revision(tmp_path / "r", tensors, manifest, {})
    assert json.loads((path / "adapter_config.json").read_text())["rank_pattern"]
    merge(model, tensors)
    torch.testing.assert_close(peft_opens(qwen3, path), model(TOKENS).logits, atol=1e-4, rtol=1e-4)
    assert read_adapter(path, base).digest(BASE) == manifest.digest
