"""Tiny models as GGUF files, written from the format's description: ours reads them by another route.

Shape suffixes: _O output features, _I input features.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

F32, Q8_0, BLOCK = 0, 8, 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LEAVES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A model as transformers has it, and the metadata and tensors of its GGUF file."""

    model: Any
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def tiny_model(architecture: str, tied: bool) -> Source:
    """Return a model with random weights; 4 heads share 2 keys, so that an exchange of the two is seen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    tokens = _tokens()
    config = AutoConfig.for_model(
        architecture, vocab_size=len(tokens), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        tie_word_embeddings=tied, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.normal_(std=0.2)
    return Source(model, _metadata(architecture, tokens), _tensors(architecture, model))


def _tokens() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *sorted(bytes_to_unicode().values()), "he", "ll", "hell", "ĠĠ"]


def _metadata(architecture: str, tokens: list[str]) -> dict[str, Any]:
    sizes = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5000.0, "rope.dimension_count": 16,
    }  # fmt: skip
    vocabulary = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": ["h e", "l l", "he ll", "Ġ Ġ"],
        "token_type": [3, 3, 3, *[1] * (len(tokens) - 3)], "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0, "padding_token_id": 2, "add_bos_token": False,
    }  # fmt: skip
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()},
        "tokenizer.chat_template": TEMPLATE,
    }


def _tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    config, found = model.config, {}
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.state_dict().items():
        path = name.removesuffix(".weight")
        if path == "lm_head" and config.tie_word_embeddings:
            continue
        if path not in names:
            _, _, layer, leaf = path.split(".", 3)
            names[path] = f"blk.{layer}.{LEAVES[leaf]}"
            if architecture == "llama" and leaf.endswith(("q_proj", "k_proj")):
                # Row i and row i + 8 of a head become neighbours.
                order = [16 * head + half + pair for head in range(len(weight) // 16)
                         for pair in range(8) for half in (0, 8)]  # fmt: skip
                weight = weight[order]
        found[f"{names[path]}.weight"] = weight.contiguous()
    return found


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], quantized: bool = False
) -> None:
    """Write a GGUF file, version 3; with `quantized` the matrices are in Q8_0."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, weight in tensors.items():
        kind = Q8_0 if quantized and weight.dim() == 2 else F32
        sizes = struct.pack(f"<{weight.dim()}Q", *reversed(weight.shape))
        header += _text(name) + struct.pack("<I", weight.dim()) + sizes + struct.pack("<IQ", kind, len(data))
        data += _padded(_blocks(weight) if kind == Q8_0 else weight.numpy().tobytes())
    path.write_bytes(_padded(header) + data)


def rounded(weight: Tensor) -> Tensor:
    """Return the values that a matrix (O, I) has in Q8_0: of 32 neighbours, whole multiples of one step."""
    steps = _steps(weight)
    return ((weight.reshape(-1, BLOCK) / steps).round() * steps).reshape(weight.shape)


def _steps(weight: Tensor) -> Tensor:
    return (weight.reshape(-1, BLOCK).abs().amax(1, keepdim=True) / 127).half().float()


def _blocks(weight: Tensor) -> bytes:
    steps = _steps(weight)
    numbers = (weight.reshape(-1, BLOCK) / steps).round().to(torch.int8)
    return torch.cat([steps.half().view(torch.int8), numbers], dim=1).numpy().tobytes()


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 32)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Return a value's type and bytes."""
    kinds = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        kind, _ = kinds.get(type(value[0]), (8, ""))
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_value(one)[4:] for one in value)
    kind, code = kinds[type(value)]
    return struct.pack(f"<I{code}", kind, value)
