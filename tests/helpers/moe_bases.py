"""Small random mixtures of experts that both vLLM's CPU kernels and transformers run."""

from pathlib import Path
from typing import Any

import torch

# The kernels want a hidden size of whole 32s; the experts' inner size is not one, so that vLLM pads it.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    # Large enough that experts and routing matter for every token.
    "initializer_range": 0.1,
}


def qwen3_moe(directory: Path, tokenizer: Path, **more: Any) -> Path:
    """Write a Qwen3-MoE of 8 experts, the first layer dense."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**SMALL, "num_experts": 8, "mlp_only_layers": [0], "norm_topk_prob": True, **more}
    return _write(Qwen3MoeConfig, Qwen3MoeForCausalLM, sizes, directory, tokenizer)


def glm4_moe(directory: Path, tokenizer: Path) -> Path:
    """Write a GLM-MoE: experts as DeepSeek's with a shared one, under grouped-query attention."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {
        **SMALL, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
    }  # fmt: skip
    return _write(Glm4MoeConfig, Glm4MoeForCausalLM, sizes, directory, tokenizer)


def _write(config_class: Any, model_class: Any, sizes: dict, directory: Path, tokenizer: Path) -> Path:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    special = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    model = model_class(config_class(**sizes, **special, vocab_size=len(words)))
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    return directory
