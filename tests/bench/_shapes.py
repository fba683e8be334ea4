"""Bases in a published model's shape with random weights, for what depends on size and not on skill.

They stand in for checkpoints on a GPU. Such a base knows nothing, so no task's reward differs between its
answers; `by_length` is a reward that does, and so lets every group teach.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN3_4B = {
    **QWEN3_06B,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
QWEN3_30B_A3B = {
    **QWEN3_06B,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
# The published configurations; the larger ones share no weights between embedding and head.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"model_type": "qwen3", **QWEN3_06B, "tie_word_embeddings": True},
    "qwen3-4b": {"model_type": "qwen3", **QWEN3_4B, "tie_word_embeddings": True},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", **QWEN3_30B_A3B, "tie_word_embeddings": False},
}


def shaped_base(shape: dict[str, Any], directory: Path, tokenizer: Path) -> Path:
    """Write random weights in a shape, in bfloat16, once; with the tokenizer of another base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if directory.exists():
        return directory
    fields = {key: value for key, value in shape.items() if key != "model_type"}
    # Ids of the tiny bases' tokenizer.
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = AutoConfig.for_model(shape["model_type"], **fields, **tokens, max_position_embeddings=4096)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draft = directory.with_name(f".draft-{directory.name}")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    for file in (*tokenizer.glob("tokenizer*"), tokenizer / "chat_template.jinja"):
        shutil.copy(file, draft)
    draft.rename(directory)
    return directory


def by_length(_question: str, _answer: str, text: str) -> float:
    """Earn 1 for a text of an even number of characters: random answers differ, in every group."""
    return float(len(text) % 2 == 0)
