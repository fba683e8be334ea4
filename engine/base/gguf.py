"""The header of a GGUF file: the model that it holds, as `config.json` and names of a Hugging Face model.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Metadata, names and shapes are compared
with lists of what engine/base/converted.py understands. A file with anything else is refused: with a part
left out it would become another model.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.base.families import BaseShapes
from engine.base.model_config import language_model
from engine.errors import BaseModelError, ConfigError

# transformers' class of each architecture; its model type has the same name.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODULES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
# An architecture's own metadata: the numbers of `config.json`, which must be there, and what may be there.
NUMBERS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
OTHERS = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "vocab_size",
)  # fmt: skip
VOCABULARY = "tokenizer.ggml.tokens"
# Metadata that changes nothing at these values.
WITHOUT_EFFECT = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0}


@dataclass(frozen=True)
class GgufModel:
    """A file's header: metadata, `config.json`, and each tensor as (GGUF name, name, shape)."""

    file: Path
    header: Any
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def dtype(self) -> str:
        """Return the converted weights' dtype: the file's, or float32 where a tensor is quantized."""
        return str(self.header.dtype or "float32").removeprefix("torch.")

    @property
    def ends(self) -> dict[str, Any]:
        """Return the `generation_config.json`: the special tokens' ids."""
        return {name: self.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    @property
    def bytes(self) -> int:
        """Return the bytes of the converted weights."""
        return sum(self.size(shape) for _, _, shape in self.tensors)

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a converted tensor of this shape."""
        return prod(shape) * (4 if self.dtype == "float32" else 2)


def read(file: Path) -> GgufModel:
    """Read a file's header; `BaseModelError` names what is missing, truncated or not understood."""
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    try:
        metadata, _ = read_gguf_metadata(str(file), (VOCABULARY,))
        if (architecture := metadata["general.architecture"]) not in ARCHITECTURES:
            raise BaseModelError(
                f"{file} holds a model of the architecture {architecture!r}, and Graftwork converts only "
                f"dense {' and '.join(ARCHITECTURES)}. Set base.name to the model's hub id instead."
            )
        header = GgufHeader.from_file(str(file))
    except (ValueError, OverflowError, struct.error) as error:
        # The reader's own errors: no GGUF, a text or number behind the end, an unknown type of tensor.
        raise BaseModelError(
            f"{file} cannot be read as GGUF: {error}. It may be truncated: compare its size and checksum "
            "with those of its source."
        ) from None
    end = max((one.offset + one.nbytes for one in header.tensors), default=0) + header.data_start
    if end > file.stat().st_size:
        raise BaseModelError(
            f"{file} is truncated: it has {file.stat().st_size:,} bytes, and its tensors end at {end:,}. "
            "Get the whole file."
        )
    config = _config(file, metadata, {one.name for one in header.tensors})
    return GgufModel(file, header, metadata, config, _tensors(file, config, header))


def _config(file: Path, metadata: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the model's `config.json`; `BaseModelError` for metadata that is missing or not understood."""
    architecture = metadata["general.architecture"]
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    own = {key: value for key, value in own.items() if WITHOUT_EFFECT.get(key) != value}
    wanted = [*(prefix + key for key in NUMBERS), VOCABULARY]
    if missing := [key for key in wanted if key not in metadata]:
        raise BaseModelError(f"{file} has no {', '.join(missing)} in its metadata. Get a complete file.")
    numbers = {name: own[key] for key, name in NUMBERS.items()}
    heads = own.get("attention.head_count_kv", numbers["num_attention_heads"])
    sizes = {**numbers, "num_key_value_heads": heads, "model_type": architecture}
    try:
        language_model(sizes)
    except ConfigError as error:
        raise BaseModelError(f"{file} is not a plain {architecture} model: {error}") from None
    width = own.get("attention.key_length", numbers["hidden_size"] // numbers["num_attention_heads"])
    same = {own.get(key, width) for key in ("attention.value_length", "rope.dimension_count")}
    unknown = sorted(prefix + key for key in own.keys() - NUMBERS.keys() - set(OTHERS))
    if unknown or same != {width}:
        what = f"it sets {', '.join(unknown)}" if unknown else "its heads differ in width or rotate in part"
        raise BaseModelError(
            f"{file} is not a plain {architecture} model: {what}, which the conversion does not support. "
            "Set base.name to the model's hub id instead."
        )
    return {
        **sizes,
        "architectures": [ARCHITECTURES[architecture]],
        "head_dim": width,
        "vocab_size": len(metadata[VOCABULARY]),
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)},
        **_ends(metadata),
    }


def _ends(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens; a chat's end of turn ends an answer too."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = sorted({one for name in ("eos", "eot") if (one := ids[name]) is not None})
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }


def _tensors(file: Path, config: Mapping[str, Any], header: Any) -> tuple[tuple[str, str, Any], ...]:
    """Return (GGUF name, name, shape) of every tensor of the model; the file must have exactly these."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    norms = {"input_layernorm": ("attn_norm", hidden), "post_attention_layernorm": ("ffn_norm", hidden)}
    if config["model_type"] == "qwen3":
        heads = {f"self_attn.{x}_norm": (f"attn_{x}_norm", config["head_dim"]) for x in "qk"}
        norms = {**norms, **heads}
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocabulary, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = ("lm_head.weight", (vocabulary, hidden))
    for path, (inputs, outputs) in BaseShapes.of(config).linear.items():
        _, _, number, module = path.split(".", 3)
        wanted[f"blk.{number}.{MODULES[module]}.weight"] = (f"{path}.weight", (outputs, inputs))
    for layer in range(config["num_hidden_layers"]):
        for norm, (leaf, width) in norms.items():
            wanted[f"blk.{layer}.{leaf}.weight"] = (f"model.layers.{layer}.{norm}.weight", (width,))
    shapes = {one.name: one.shape for one in header.tensors}
    faults = [f"it lacks {name}" for name in wanted.keys() - shapes.keys()]
    faults += [f"it has {name}, which is unknown" for name in shapes.keys() - wanted.keys()]
    faults += [
        f"{name} has the shape {list(shapes[name])} and not {list(shape)}"
        for name, (_, shape) in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if faults:
        raise BaseModelError(
            f"{file} is not a plain {config['model_type']} model: {min(faults)} ({len(faults)} such faults). "
            "Set base.name to the model's hub id instead."
        )
    return tuple((name, *into) for name, into in wanted.items())
