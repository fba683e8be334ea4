"""Read an untrusted `config.json` of a model and validate its numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# Fields that must be positive integers where present, and fields that may also be 0.
COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "vocab_size", "num_experts", "num_local_experts",
    "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "decoder_sparse_step", "index_n_heads", "index_head_dim",
)  # fmt: skip
COUNTS_FROM_ZERO = ("n_shared_experts", "first_k_dense_replace")
# Far above any real model, so that planning always ends.
LARGEST = 1 << 24
MOST_LAYERS = 4096


def read_config(path: Path) -> dict[str, Any]:
    """Return the language model's part of the `config.json` at `path` or in the directory `path`.

    Raises `ConfigError` when the file is not a JSON object, or with the first invalid number.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        body = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}. Give a model's config.json.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}. Give a model's config.json.") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{file} is not a JSON object. Give a model's config.json.")
    return language_model(body)


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the language model; see `read_config` for errors."""
    inner = config.get("text_config")
    if "hidden_size" not in config and isinstance(inner, Mapping):
        config = {"quantization_config": config.get("quantization_config"), **inner}
    if not isinstance(config.get("model_type"), str):
        raise ConfigError("The config has no model_type. Give a model's config.json.")
    for name in (*COUNTS, *COUNTS_FROM_ZERO):
        value, least = config.get(name), int(name in COUNTS)
        largest = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        if value is not None and not (type(value) is int and least <= value <= largest):
            raise ConfigError(
                f"{name} in the config is {value!r}; it must be an integer from {least} to {largest}."
            )
    if not isinstance(config.get("mlp_only_layers") or [], list):
        raise ConfigError("mlp_only_layers in the config must be a list of layers.")
    return dict(config)
