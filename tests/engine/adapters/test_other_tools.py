"""Adapters in the forms of other tools: what is unambiguous is read, the rest named for what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import AdapterError
from engine.publishing.foreign import read_adapter
from tests.helpers.made_adapters import save
from tests.helpers.malformed import BASE, CONFIG, MODEL, QUERY, TENSORS, good, tensors_changed


def added(name: str, *shape: int) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def renamed(old: str, new: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


HEAD, EMBEDDING = "base_model.model.lm_head", f"{MODEL}.embed_tokens"
NAMED = {
    "a factor of the head": (added(f"{HEAD}.lora_A.weight", 2, 8), "Train without lm_head"),
    "the head itself": (added(f"{HEAD}.base_layer.weight", 16, 8), "Train without lm_head"),
    "a factor of the embeddings": (added(f"{EMBEDDING}.lora_embedding_A", 2, 16), "Train without lm_head"),
    "of a compiled model": (renamed(".model.model.", ".model._orig_mod.model."), "a compiler"),
    "of FSDP": (renamed(".mlp.", ".mlp._fsdp_wrapped_module."), "a distributed trainer"),
    "of a multimodal model": (renamed(".layers.", ".language_model.layers."), "multimodal model"),
    "of two adapters": (added(f"{QUERY}.lora_A.other.weight", 2, 8), "several adapters: '', 'other'"),
    "of kohya's scripts": (renamed(".lora_A.", ".lora_down."), "kohya's scripts"),
    "a bias of B": (added(f"{QUERY}.lora_B.bias", 12), "it is a bias"),
    "of DoRA": (added(f"{QUERY}.lora_magnitude_vector", 12), "it is of DoRA"),
    "of LoHa": (added(f"{QUERY}.hada_w1_a", 2, 2), "another method"),
    "a classifier": (added("base_model.model.score.weight", 2, 8), "head for scores"),
}


@pytest.mark.parametrize("name", NAMED)
def test_names_that_no_module_of_the_base_has_are_explained(tmp_path, name):
    change, words = NAMED[name]
    tensors_changed(change)(tmp_path, BASE)
    with pytest.raises(AdapterError, match=words):
        read_adapter(tmp_path, BASE)


SHARD = "adapter_model-00001-of-00002.safetensors"
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shards": (lambda path: (path / TENSORS).rename(path / SHARD), "in shards"),
    "an index": (lambda path: (path / TENSORS).rename(path / f"{TENSORS}.index.json"), "in shards"),
    "MLX's settings": (lambda path: (path / CONFIG).write_text('{"lora_parameters": {}}'), "that MLX made"),
    "MLX's tensors": (lambda path: (path / TENSORS).rename(path / "adapters.safetensors"), "is of MLX"),
    "a whole model": (lambda path: (path / CONFIG).rename(path / "config.json"), "a whole model"),
    "a training's": (lambda path: (path / CONFIG).unlink() or good(path / "step-9", BASE), "is in step-9"),
    "a pickle": (lambda path: (path / TENSORS).rename(path / "adapter_model.bin"), "bin is not opened"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_kind_is_named_for_what_it_is(tmp_path, name):
    change, words = FOLDERS[name]
    change(good(tmp_path, BASE))
    with pytest.raises(AdapterError, match=words):
        read_adapter(tmp_path, BASE)


@pytest.mark.parametrize("adapter", ["default", "my-sums_2"])
def test_a_state_dict_that_names_its_adapter_is_the_same_adapter(tmp_path, adapter):
    wanted = read_adapter(good(tmp_path / "plain", BASE), BASE)
    change = {".lora_A.weight": f".lora_A.{adapter}.weight", ".lora_B.weight": f".lora_B.{adapter}.weight"}
    tensors = load_file(tmp_path / "plain" / TENSORS)
    for old, new in change.items():
        renamed(old, new)(tensors)
    save(tmp_path / "named", tensors, {})
    (tmp_path / "plain" / CONFIG).rename(tmp_path / "named" / CONFIG)
    assert read_adapter(tmp_path / "named", BASE).digest("b" * 64) == wanted.digest("b" * 64)


def test_safetensors_are_read_where_a_pickle_lies_beside_them(tmp_path):
    (good(tmp_path, BASE) / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert read_adapter(tmp_path, BASE).found.tensors > 0
