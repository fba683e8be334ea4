"""Small random bases with latent attention (DeepSeek-V3, and sparse: V3.2) that vLLM and transformers run."""

from pathlib import Path
from typing import Any

import torch

# vLLM's decode kernel for CPUs knows no other kv_lora_rank and qk_rope_head_dim than these.
SMALL = {
    "hidden_size": 128, "intermediate_size": 160, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32, "v_head_dim": 48, "n_routed_experts": 32, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "num_mtp_layers": 0, "max_position_embeddings": 256,
    # 32 experts: torch rounds the router's sigmoid otherwise when a step has fewer than 32 scores.
    # vLLM never ties DeepSeek's head, and takes its way of routing from the files that DeepSeek publishes.
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip


def deepseek_v3(directory: Path, tokenizer: Path, **more: Any) -> Path:
    """Write a DeepSeek-V3, the first layer dense; `q_lora_rank` None gives it a `q_proj`.

    Its weights are large enough that positions and routing matter for every token.
    """
    return _write("deepseek_v3", {"q_lora_rank": 48, **more}, directory, tokenizer)


def deepseek_v32(directory: Path, tokenizer: Path, **more: Any) -> Path:
    """Write a DeepSeek-V3.2, which attends to 6 keys of each row."""
    sparse = {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 128}
    return _write("deepseek_v32", {"q_lora_rank": 48, **sparse, **more}, directory, tokenizer)


def _write(model_type: str, sizes: dict[str, Any], directory: Path, tokenizer: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    special = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(model_type, **{**SMALL, **sizes}, **special, vocab_size=len(words))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for values in model.parameters():
        noise = torch.randn(values.shape, generator=generator)
        values.data = noise * values.shape[-1] ** -0.5 if values.dim() > 1 else 1 + 0.2 * noise
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    return directory
