"""The plan on a CPU: how many tokens a microbatch has, and a refusal before anything is loaded."""

import json

import pytest

from engine.base.toys.recipes import RECIPES
from engine.errors import ConfigError
from engine.planning import host
from engine.planning.memory import GIB, token_bytes
from engine.services import lifecycle
from engine.settings.params import Params

# HuggingFaceTB/SmolLM2-135M-Instruct, as its config.json states it.
SMOLLM2 = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def params(tmp_path) -> Params:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(SMOLLM2))
    return Params.model_validate({"base": {"name": str(base)}, "state_dir": tmp_path / "state"})


def trainer(params: Params, **settings: object) -> Params:
    return params.model_copy(update={"trainer": params.trainer.model_copy(update=settings)})


def test_a_microbatch_holds_what_its_activations_may_take(params):
    tokens = host.microbatch_tokens(SMOLLM2, params)
    one = token_bytes(host.Shape.of(SMOLLM2), 4, params.engine.max_rank, checkpointing=False)
    assert tokens * one <= host.ACTIVATION_BYTES < (tokens + 1) * one
    assert 400 < tokens < 1000
    again = trainer(params, gradient_checkpointing=True)
    assert host.microbatch_tokens(SMOLLM2, again) > 5 * tokens


def test_the_kv_cache_holds_the_longest_batch(params, monkeypatch):
    """128 sequences of 8 blocks and vLLM's null block: 2 x 192 numbers of 4 bytes a token and layer."""
    block = 32 * 30 * 2 * 192 * 4
    assert host.kv_cache_bytes(SMOLLM2, params.engine) == (128 * 8 + 1) * block
    assert host.kv_cache_bytes(RECIPES["tiny-dense"].config(), params.engine) == host.LEAST_KV_CACHE
    assert host.kv_cache_bytes(SMOLLM2, params.engine.model_copy(update={"kv_cache_gib": 0.5})) == GIB // 2
    monkeypatch.setattr(host, "memory_bytes", lambda: 4 * GIB)
    assert host.kv_cache_bytes(SMOLLM2, params.engine) == GIB // 2


def test_a_small_base_and_a_setting_are_not_limited(params):
    assert host.microbatch_tokens(RECIPES["tiny-dense"].config(), params) == 8192
    assert host.microbatch_tokens(SMOLLM2, trainer(params, microbatch_tokens=5000)) == 5000
    assert host.microbatch_tokens({"model_type": "unplanned"}, params) == 8192


@pytest.mark.parametrize("names", [{"trainer"}, {"engine"}, {"trainer", "engine"}])
def test_services_start_only_with_the_memory_that_they_need(params, names, monkeypatch):
    """One byte less is refused with every part, before the base is opened."""
    monkeypatch.setattr("engine.base.resident.ensure_base", lambda *_: pytest.fail("the base was opened"))
    monkeypatch.setattr("engine.planning.gpu.cuda_bytes", lambda: None)
    chosen = [service for service in lifecycle.services(params) if service.name in names]
    parts = host.host_parts(SMOLLM2, params, names)
    needed = sum(parts.values())
    # Weights of 538 MB in float32, in each of the two, and their libraries.
    assert needed > len(names) * (538e6 + GIB // 2)
    monkeypatch.setattr(host, "free_bytes", lambda: needed)
    lifecycle.check_base(params, chosen)
    monkeypatch.setattr(host, "free_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"trainer\.microbatch_tokens.*engine\.kv_cache_gib") as error:
        lifecycle.check_base(params, chosen)
    assert all(what in str(error.value) for what in parts)


def test_a_service_without_a_base_needs_no_plan(params, monkeypatch):
    monkeypatch.setattr(host, "free_bytes", lambda: 0)
    lifecycle.check_base(params, [one for one in lifecycle.services(params) if one.name == "controller"])
