"""The memory plan: counted by a second route, a refusal whose remedies are true, a share that leaves room."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.base.sizes import Shape
from engine.errors import ConfigError
from engine.planning.memory import GIB, MemoryPlan, layer_bytes, plan, refuse_unless_it_fits
from engine.settings.services import EngineConfig, TrainerConfig
from tests.helpers.model_configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA3_8B, QWEN3_30B_A3B

# Qwen/Qwen3-0.6B, as its config.json states it.
QWEN3_06B = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
ODD_MOE = QWEN3_30B_A3B | {"mlp_only_layers": [0, 5], "decoder_sparse_step": 2, "num_hidden_layers": 7}
QWEN2_05B = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL_7B = LLAMA3_8B | {"model_type": "mistral", "vocab_size": 32000}
# deepseek-ai/DeepSeek-V3.2-Exp has an indexer in every layer beside DeepSeek-V3's sizes.
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip
# Moonlight and DeepSeek-V2-Lite have no narrow query.
MOONLIGHT = DEEPSEEK_V3 | {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": None, "n_shared_experts": 2,
    "attention_bias": True,
}  # fmt: skip
GLM_45_AIR = {
    "model_type": "glm4_moe", "num_hidden_layers": 46, "hidden_size": 4096, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "vocab_size": 151552, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "attention_bias": True,
}  # fmt: skip
GLM_45 = GLM_45_AIR | {"use_qk_norm": True, "first_k_dense_replace": 3}
MIXTRAL_8X7B = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
BIASED = LLAMA3_8B | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    "config",
    [
        QWEN3_06B, LLAMA3_8B, QWEN3_30B_A3B, ODD_MOE, QWEN2_05B, MISTRAL_7B, BIASED, DEEPSEEK_V3,
        DEEPSEEK_V32, MOONLIGHT, GLM_45_AIR, GLM_45, MIXTRAL_8X7B, GPT_OSS_20B,
    ],
    ids=[
        "qwen3", "llama", "moe", "odd-moe", "qwen2", "mistral", "biased", "deepseek", "deepseek-3.2",
        "moonlight", "glm-air", "glm", "mixtral", "gpt-oss",
    ],
)  # fmt: skip
def test_the_formula_counts_what_transformers_builds(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    assert Shape.of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_count_is_the_published_one():
    assert round(Shape.of(QWEN3_06B).parameters / 1e9, 3) == 0.596
    assert round(Shape.of(LLAMA3_8B).parameters / 1e9, 2) == 8.03
    assert round(Shape.of(QWEN3_30B_A3B).parameters / 1e9, 1) == 30.5
    assert round(Shape.of(DEEPSEEK_V3).parameters / 1e9) == 671
    assert round(Shape.of(MIXTRAL_8X7B).parameters / 1e9, 1) == 46.7


def test_another_family_is_refused_by_name():
    with pytest.raises(ConfigError, match="family 'mamba'"):
        plan({"model_type": "mamba"}, 80 * GIB, EngineConfig(), TrainerConfig())


@pytest.mark.parametrize("config", [QWEN3_06B, QWEN3_30B_A3B, MOONLIGHT], ids=["dense", "moe", "latent"])
def test_the_width_of_adapters_is_that_of_the_packed_layout(config):
    from engine.base.families import BaseShapes

    modules = BaseShapes.of(config).modules()
    assert Shape.of(config).lora_width == sum(inputs + outputs for inputs, outputs in modules.values())


def test_a_latent_is_cached_once_a_token():
    """As DeepSeek-V3's paper has it (arXiv 2412.19437): 512 + 64 numbers a token and layer, no head's own."""
    tokens = 4096
    found = plan(DEEPSEEK_V3, 80 * GIB, EngineConfig(max_model_len=tokens, max_num_seqs=1), TrainerConfig())
    assert found.engine_kv_cache == (tokens + 16) * 61 * 576 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["own keys", "shared keys"])
def test_a_layer_keeps_about_what_the_formula_says(dtype, heads, tmp_path):
    """Measure by saved tensor hooks: one layer more keeps one layer's bytes more."""
    kept = [saved_bytes(tmp_path / f"{layers}", small(layers, heads), dtype) for layers in (2, 3)]
    measured = (kept[1] - kept[0]) / TOKENS
    planned = layer_bytes(Shape.of(small(3, heads).to_dict()), dtype.itemsize, RANK)
    # Scalars of a token and head (the norms' and softmax's sums) are not counted; heads are tiny here.
    assert 0.9 * planned <= measured <= 1.05 * planned, (planned, measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_experts_keeps_about_what_the_formula_says(dtype, tmp_path):
    kept = [saved_bytes(tmp_path / f"{layers}", sparse(layers), dtype) for layers in (2, 3)]
    measured = (kept[1] - kept[0]) / TOKENS
    planned = layer_bytes(Shape.of(sparse(3).to_dict()), dtype.itemsize, RANK)
    assert 0.9 * planned <= measured <= 1.05 * planned, (planned, measured)


TOKENS, RANK = 60, 8
# Tokens, pairs of a token and one of its three experts, and the heads of attention's copies.
GROWING_AXES = {TOKENS, 3 * TOKENS, 16}


def small(layers: int, heads: tuple[int, int]):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, head_dim=16,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], tie_word_embeddings=True,
    )  # fmt: skip


def sparse(layers: int):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=64, hidden_size=96, moe_intermediate_size=80, num_hidden_layers=layers, head_dim=16,
        num_attention_heads=8, num_key_value_heads=2, num_experts=12, num_experts_per_tok=3,
        norm_topk_prob=True, tie_word_embeddings=True,
    )  # fmt: skip


def saved_bytes(directory, config, dtype: torch.dtype) -> int:
    from transformers import AutoModelForCausalLM

    from engine.training.model.packing import TokenRow
    from tests.helpers.resident_bases import resident

    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    base = resident(directory, threads=1, microbatch_tokens=TOKENS, dtype=dtype)
    adapter = base.new_adapter(RANK, 8.0, base.shapes.targets, torch.Generator().manual_seed(0))
    ours = {parameter.untyped_storage().data_ptr() for parameter in base.model.parameters()}
    ours |= {factor.untyped_storage().data_ptr() for factor in adapter.factors.values()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Only what grows with the tokens: a copy of a factor in the base's dtype does not.
        if storage.data_ptr() not in ours and not GROWING_AXES.isdisjoint(tensor.shape):
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), base.using(adapter):
        # A prompt and two samples: 60 tokens with 120 keys; a row's last token is not computed.
        prompt, own = range(TOKENS // 2), range(TOKENS // 4)
        base.logprobs([TokenRow((*prompt, *own, last), len(prompt)) for last in (0, 1)])
    return sum(storage.nbytes() for storage in found.values())


engines = st.builds(
    EngineConfig,
    slots=st.integers(2, 64),
    max_rank=st.sampled_from([8, 16, 64]),
    max_model_len=st.integers(16, 8192),
    max_num_seqs=st.integers(1, 256),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
)
trainers = st.builds(
    TrainerConfig,
    device=st.sampled_from(["auto", "cpu"]),
    gradient_checkpointing=st.sampled_from([None, True, False]),
    sessions=st.integers(1, 16),
    microbatch_tokens=st.integers(64, 32768),
)
bases = st.sampled_from([QWEN3_06B, LLAMA3_8B, QWEN3_30B_A3B])


@pytest.mark.long
@given(bases, st.integers(1, 200), engines, trainers)
def test_shares_of_a_plan_that_fits_leave_room_for_each_other(config, available, engine, trainer):
    found = plan(config, available * GIB, engine, trainer)
    assert all(size >= 0 for size in found.parts.values())
    assert found.needed == sum(found.parts.values())
    if not found.fits:
        with pytest.raises(ConfigError):
            refuse_unless_it_fits(config, found, engine, trainer)
        return
    refuse_unless_it_fits(config, found, engine, trainer)
    contexts = found.trainer_context + found.engine_context
    ours = found.engine_base + found.engine_kv_cache + found.engine_slots + found.engine_activations
    assert 0 <= found.gpu_memory_utilization * found.available - ours <= found.available / 9_999
    assert found.gpu_memory_utilization + found.trainer_share + contexts / found.available <= 1 + 1e-9
    trainers_part = found.trainer_base + found.trainer_adapters + found.trainer_activations
    assert found.trainer_share * found.available >= trainers_part - found.available / 9_999
    assert found.sequences >= engine.max_num_seqs


GROWING = [
    ("engine", "slots", 2),
    ("engine", "max_num_seqs", 2),
    ("engine", "max_model_len", 2),
    ("trainer", "sessions", 2),
    ("trainer", "microbatch_tokens", 2),
]


@given(bases, engines, trainers, st.sampled_from(GROWING))
def test_more_of_anything_never_needs_less(config, engine, trainer, change):
    section, field, factor = change
    before = plan(config, 80 * GIB, engine, trainer)
    if section == "engine":
        engine = engine.model_copy(update={field: getattr(engine, field) * factor})
    else:
        trainer = trainer.model_copy(update={field: getattr(trainer, field) * factor})
    after = plan(config, 80 * GIB, engine, trainer)
    assert all(after.parts[name] >= size for name, size in before.parts.items())


@pytest.mark.parametrize("config", [QWEN3_06B, QWEN3_30B_A3B], ids=["dense", "moe"])
def test_a_call_beside_gradients_from_before_is_planned_for(config):
    """What is served gathers into new gradients, and puts those from before back if it fails."""
    few, many = (
        plan(config, 80 * GIB, EngineConfig(max_rank=rank), TrainerConfig(microbatch_tokens=64, sessions=1))
        for rank in (8, 64)
    )
    # The other four numbers of a session's own.
    one_number = (many.trainer_adapters - few.trainer_adapters) / 4
    assert many.trainer_activations - few.trainer_activations >= one_number


def test_checkpointing_and_bfloat16_need_less():
    def needed(checkpointing: bool, dtype: str) -> MemoryPlan:
        trainer = TrainerConfig(gradient_checkpointing=checkpointing)
        return plan(QWEN3_06B, 80 * GIB, EngineConfig(dtype=dtype), trainer)

    both, plain, wide = needed(True, "bfloat16"), needed(False, "bfloat16"), needed(True, "float32")
    assert both.trainer_activations < plain.trainer_activations / 5
    assert wide.trainer_base == 2 * both.trainer_base == 2 * both.engine_base
    assert both.trainer_adapters == wide.trainer_adapters


def test_a_trainer_on_the_cpu_needs_nothing_of_the_gpu():
    found = plan(QWEN3_06B, 80 * GIB, EngineConfig(), TrainerConfig(device="cpu"))
    assert {name for name, size in found.parts.items() if size == 0} == {
        "trainer_base", "trainer_adapters", "trainer_activations", "trainer_context"
    }  # fmt: skip


ROOMY = EngineConfig(max_model_len=2048, max_num_seqs=128)


def test_a_refusal_states_the_numbers_and_each_remedy_is_just_enough():
    import re

    trainer = TrainerConfig()
    found = plan(QWEN3_06B, 24 * GIB, ROOMY, trainer)
    with pytest.raises(ConfigError, match=r"24\.00 GiB.*KV cache") as error:
        refuse_unless_it_fits(QWEN3_06B, found, ROOMY, trainer)
    remedies = dict(re.findall(r"engine\.(\w+): (\d+)", str(error.value)))
    assert set(remedies) >= {"max_num_seqs", "max_model_len"}
    for field, value in remedies.items():
        for change, fits in ((int(value), True), (int(value) + 1, False)):
            changed = ROOMY.model_copy(update={field: change})
            assert plan(QWEN3_06B, 24 * GIB, changed, trainer).fits is fits


def test_a_base_that_can_never_fit_is_refused_without_a_remedy():
    found = plan(QWEN3_30B_A3B, 40 * GIB, EngineConfig(), TrainerConfig())
    with pytest.raises(ConfigError, match="smaller base"):
        refuse_unless_it_fits(QWEN3_30B_A3B, found, EngineConfig(), TrainerConfig())


def test_a_kv_cache_that_holds_no_sequence_is_refused():
    engine = EngineConfig(max_model_len=8192, kv_cache_gib=0.5)
    found = plan(QWEN3_06B, 80 * GIB, engine, TrainerConfig())
    with pytest.raises(ConfigError, match="sequence of 8192"):
        refuse_unless_it_fits(QWEN3_06B, found, engine, TrainerConfig())
