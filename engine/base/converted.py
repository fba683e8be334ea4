"""Convert a GGUF file to a Hugging Face directory: config, weights, tokenizer with chat template.

transformers reads blocks and vocabulary; quantized blocks become the float32 values that they stand for.

Shape suffixes: _O output features, _I input features.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.base.gguf import GgufModel
from engine.base.progress import Progress
from engine.errors import BaseModelError
from engine.files import sync

# llama.cpp's names of rules that cut text before the merges: GPT-2's, and SmolLM's, where a digit is a piece.
GPT2, SMOLLM = ("gpt-2", "default"), "smollm"
SHARD_BYTES = 2 << 30
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def convert(model: GgufModel, directory: Path, progress: Progress) -> None:
    """Write the model into an empty directory, one tensor after another; `progress` is called after each.

    Raises `BaseModelError` when the disk has too little room or fills, and for an unknown tokenizer.
    """
    from safetensors import SafetensorError

    place, free = directory.parent, shutil.disk_usage(directory).free
    size = f"The base of {model.file} takes {model.bytes / 1e9:.2f} GB in {place}"
    if model.bytes > free:
        raise BaseModelError(f"{size}, and {free / 1e9:.2f} GB are free there. Free some, or move state_dir.")
    try:
        _tokenizer(model).save_pretrained(directory)
        _write(directory / "config.json", {**model.config, "dtype": model.dtype})
        _write(directory / "generation_config.json", model.ends)
        _save(model, directory, progress)
        for file in directory.iterdir():
            sync(file)
    except (OSError, SafetensorError) as error:
        raise BaseModelError(
            f"{size}, and writing it failed: {error}. Nothing of it was kept. Free some space "
            "there, or move state_dir."
        ) from None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _save(model: GgufModel, directory: Path, progress: Progress) -> None:
    """Write the weights in files of at most `SHARD_BYTES`, or one tensor, and the index of several files."""
    from safetensors.torch import save_file
    from transformers.integrations.gguf.reader import load_gguf_state_dict

    stored, done = load_gguf_state_dict(model.header), 0
    shards = _shards(model)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = (
            "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        weights = {}
        for source, target, shape in shard:
            weights[target] = _weight(model, target, shape, stored[source])
            done += 1
            progress(done, len(model.tensors), target)
        save_file(weights, directory / name, {"format": "pt"})
        places |= dict.fromkeys(weights, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": model.bytes}, "weight_map": places}
        _write(directory / "model.safetensors.index.json", index)


def _shards(model: GgufModel) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """Return the tensors cut into files."""
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    room = SHARD_BYTES
    for one in model.tensors:
        if shards[-1] and model.size(one[2]) > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(one)
        room -= model.size(one[2])
    return shards


def _weight(model: GgufModel, name: str, shape: tuple[int, ...], stored: Any) -> Tensor:
    """Return a tensor's values; a Llama's queries and keys get transformers' order of rotary dimensions back.

    llama.cpp pairs neighbouring rows of a head where transformers pairs row i with row i + width / 2
    (`permute` of its convert_hf_to_gguf.py).
    """
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    values = stored[...]
    if stored.ggml_type in GGML_BLOCK:
        values = dequantize(values.flatten(), stored.ggml_type)
    values = values.reshape(shape).to(getattr(torch, model.dtype))
    if model.config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        pairs = values.unflatten(0, (-1, model.config["head_dim"] // 2, 2))
        values = pairs.transpose(1, 2).flatten(0, 2)
    return values.contiguous()


def _tokenizer(model: GgufModel) -> Any:
    """Return the file's tokenizer with its special tokens and chat template."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, vocabulary, _ = get_gguf_tokenizer(str(model.file))
    kind, rule = vocabulary.get("tokenizer_type"), vocabulary.get("pre_tokenizer_type", "default")
    if kind not in ("gpt2", "llama") or (
        kind == "gpt2" and rule not in (*GPT2, SMOLLM, *GGUF_PRE_TOKENIZER_SPLITS)
    ):
        raise BaseModelError(
            f"{model.file} has a tokenizer {kind!r} with the rule {rule!r}, which is unknown here: another "
            "rule would give other tokens. Set base.name to the model's hub id instead."
        )
    core, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if rule == SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ids = {token: model.metadata.get(f"tokenizer.ggml.{name}_token_id") for token, name in SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=model.metadata.get("tokenizer.chat_template"),
        model_max_length=model.config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        add_bos_token=model.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        **{token: vocabulary["tokens"][number] for token, number in ids.items() if number is not None},
    )
