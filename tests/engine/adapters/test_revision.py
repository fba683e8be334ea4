"""Revisions: the digest names content, the directory is whole or absent, bad input is named."""

import hashlib
import json
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.adapters import revision
from engine.errors import AdapterError, BaseModelError, Conflict

BASE = "b" * 64
SHAPES = {
    "model.layers.0.self_attn.q_proj": (6, 4),
    "model.layers.0.mlp.down_proj": (5, 6),
}
TARGETS = ("q_proj", "down_proj")


def make_tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (size_in, size_out) in SHAPES.items():
        tensors[f"{module}.lora_A"] = torch.randn(2, size_in, generator=generator).to(dtype)
        tensors[f"{module}.lora_B"] = torch.randn(size_out, 2, generator=generator).to(dtype)
    return tensors


def make_manifest(tensors, **changes):
    settings = {
        "policy": "p",
        "base_digest": BASE,
        "rank": 2,
        "targets": TARGETS,
        "step": 3,
        **changes,
    }
    return revision.make_manifest(tensors, **settings)


def test_digest_equals_a_plain_rewrite_of_its_definition():
    tensors = make_tensors()
    rows = [
        [*key.rsplit(".", 1), -1, list(tensor.shape), "float32"] for key, tensor in sorted(tensors.items())
    ]
    header = {
        "rank": 2,
        "alpha": 2,
        "targets": sorted(TARGETS),
        "base": BASE,
        "tensors": rows,
    }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b"".join(tensor.numpy().tobytes() for _, tensor in sorted(tensors.items()))
    assert revision.digest(tensors, 2, TARGETS, BASE) == hashlib.sha256(content).hexdigest()


def test_digest_ignores_order_and_memory_layout():
    tensors = make_tensors()
    shuffled = {key: tensors[key].t().contiguous().t() for key in reversed(tensors)}
    assert revision.digest(shuffled, 2, TARGETS[::-1], BASE) == revision.digest(tensors, 2, TARGETS, BASE)


def test_the_bytes_of_one_column_that_was_a_slice():
    """Torch calls it contiguous and keeps its stride of 64: B of rank 1, out of a fused block."""
    column = torch.arange(128.0).view(2, 64)[:, :1]
    column = column.as_strided((2, 1), (1, 64))
    assert column.is_contiguous()
    assert bytes(revision.tensor_bytes(column)) == column.clone().numpy().tobytes()


@pytest.mark.parametrize("what", ["value", "rank", "targets", "base", "dtype", "name", "expert"])
def test_digest_changes_with(what):
    tensors, arguments = make_tensors(), [2, TARGETS, BASE]
    before = revision.digest(tensors, *arguments)
    key = "model.layers.0.self_attn.q_proj.lora_A"
    if what == "value":
        tensors[key][0, 0] += 1e-6
    elif what in ("rank", "targets", "base"):
        arguments[["rank", "targets", "base"].index(what)] = {
            "rank": 4,
            "targets": ("q",),
            "base": "c",
        }[what]
    elif what == "dtype":
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    else:
        new = "model.layers.1.x.lora_A" if what == "name" else "model.layers.0.mlp.experts.3.up_proj.lora_A"
        tensors[new] = tensors.pop(key)
    assert revision.digest(tensors, *arguments) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directory_round_trip_is_exact(tmp_path, dtype):
    tensors = make_tensors(dtype=dtype)
    manifest = make_manifest(tensors, parent="a" * 64, config={"lr": 0.1})
    path = revision.write_revision(tmp_path / "p" / "x", tensors, manifest, {"prompts": [1]})
    back, read = revision.read_revision(path, BASE)
    assert read == manifest
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert json.loads((path / "probe.json").read_text()) == {"prompts": [1]}


def test_writing_again_changes_nothing_and_another_revision_conflicts(tmp_path):
    tensors = make_tensors()
    path = revision.write_revision(tmp_path / "x", tensors, make_manifest(tensors), {})
    before = path.stat().st_mtime_ns
    revision.write_revision(tmp_path / "x", tensors, make_manifest(tensors), {})
    assert path.stat().st_mtime_ns == before
    other = make_tensors(seed=1)
    with pytest.raises(Conflict, match="never overwritten"):
        revision.write_revision(tmp_path / "x", other, make_manifest(other), {})


def test_a_failed_write_leaves_nothing(tmp_path):
    tensors = make_tensors()
    manifest = make_manifest(tensors)
    tensors["model.layers.0.mlp.down_proj.lora_B"][0, 0] = float("nan")
    with pytest.raises(AdapterError, match=r"down_proj\.lora_B"):
        revision.write_revision(tmp_path / "x", tensors, manifest, {})
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_a_kill_left_is_replaced(tmp_path, monkeypatch):
    tensors = make_tensors()
    given = tmp_path / "x", tensors, make_manifest(tensors), {}
    for _ in range(2):
        if (child := os.fork()) == 0:
            monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            revision.write_revision(*given)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) != [tmp_path / "x"]
    path = revision.write_revision(*given)
    assert list(tmp_path.iterdir()) == [path]
    assert revision.read_revision(path)[1] == given[2]


def test_two_that_write_the_same_revision_leave_each_other_s_draft_alone(tmp_path, monkeypatch):
    """The second comes while the first has written its files and not yet read them back."""
    tensors = make_tensors()
    given = tmp_path / "x", tensors, make_manifest(tensors), {}
    read, ended, started = revision.read_revision, threading.Event(), []

    def second() -> Path:
        try:
            return revision.write_revision(*given)
        finally:
            ended.set()

    def is_met(*arguments):
        if not started:
            started.append(pool.submit(second))
            ended.wait(0.5)
        return read(*arguments)

    monkeypatch.setattr(revision, "read_revision", is_met)
    with ThreadPoolExecutor(1) as pool:
        path = revision.write_revision(*given)
        assert started[0].result(20) == path
    assert list(tmp_path.iterdir()) == [path]
    assert revision.read_revision(path)[1] == given[2]


def test_another_base_is_refused(tmp_path):
    tensors = make_tensors()
    path = revision.write_revision(tmp_path / "x", tensors, make_manifest(tensors), {})
    with pytest.raises(BaseModelError, match="cccccccccccc"):
        revision.read_revision(path, "c" * 64)


@pytest.mark.parametrize("fault", ["truncated", "pickle", "missing", "altered", "manifest"])
def test_damaged_directories_are_refused(tmp_path, fault):
    tensors = make_tensors()
    path = revision.write_revision(tmp_path / "x", tensors, make_manifest(tensors), {})
    file = path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    if fault == "truncated":
        file.write_bytes(content[:-8])
    elif fault == "altered":
        content[-1] ^= 1
        file.write_bytes(content)
    elif fault == "manifest":
        (path / "manifest.json").write_text("{}")
    else:
        file.unlink()
        if fault == "pickle":
            torch.save(tensors, path / "adapter_model.bin")
    with pytest.raises(AdapterError):
        revision.read_revision(path)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            "model.layers.0.self_attn.q_proj.lora_A",
            lambda t: t[:1],
            r"\(1, 6\).*\(2, 6\)",
        ),
        (
            "model.layers.0.self_attn.q_proj.lora_B",
            lambda t: t.t(),
            r"\(2, 4\).*\(4, 2\)",
        ),
        (
            "model.layers.0.mlp.down_proj.lora_A",
            lambda t: t * float("inf"),
            "NaN or Inf",
        ),
        ("model.layers.0.mlp.down_proj.lora_A", lambda t: None, "other half"),
        (
            "model.layers.9.mlp.down_proj.lora_A",
            lambda t: torch.ones(2, 5),
            "does not have",
        ),
        (
            "model.layers.0.mlp.down_proj.weight",
            lambda t: torch.ones(2, 5),
            "lora_A or .lora_B",
        ),
    ],
)
def test_validate_names_the_tensor(key, change, message):
    tensors = make_tensors()
    changed = change(tensors.get(key))
    tensors = {name: tensor for name, tensor in tensors.items() if name != key}
    if changed is not None:
        tensors[key] = changed
    with pytest.raises(AdapterError, match=message) as caught:
        revision.validate(tensors, 2, SHAPES)
    assert key.rsplit(".", 1)[0] in str(caught.value)


def test_validate_accepts_what_fits():
    revision.validate(make_tensors(), 2, SHAPES)


def test_peft_opens_the_directory_and_computes_base_plus_ba(tmp_path):
    config = Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    tensors = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): torch.randn_like(parameter)
        for name, parameter in wrapped.named_parameters()
        if "lora_" in name
    }
    model = wrapped.unload()
    revision.write_revision(tmp_path / "x", tensors, make_manifest(tensors), {})
    tokens = torch.arange(6)[None]
    for module in {key.rsplit(".", 1)[0] for key in tensors}:
        weight = model.get_submodule(module).weight
        weight.data += tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
    merged = model(tokens).logits.detach()
    for module in {key.rsplit(".", 1)[0] for key in tensors}:
        weight = model.get_submodule(module).weight
        weight.data -= tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
    adapted = PeftModel.from_pretrained(model, str(tmp_path / "x"))
    torch.testing.assert_close(adapted(tokens).logits.detach(), merged, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_no_number_is_seen_wherever_it_is(dtype, value):
    generator = torch.Generator().manual_seed(0)
    for place in (0, 7, 64, 4094, 4095):
        tensor = torch.randn(4096, generator=generator).to(dtype).view(64, 64)
        assert revision.is_finite(tensor)
        tensor.view(-1)[place] = value
        assert not revision.is_finite(tensor)
        assert not revision.is_finite(tensor.T)


def test_a_probe_that_was_missing_is_added_and_one_that_is_there_stays(tmp_path):
    tensors = make_tensors()
    manifest = revision.make_manifest(
        tensors, policy="sums", base_digest=BASE, rank=2, targets=TARGETS, step=1
    )
    path = revision.write_revision(tmp_path / "r", tensors, manifest, {})
    first, second = ({"dtype": "float32", "rows": [number]} for number in (1, 2))
    for given in (first, second):
        revision.write_revision(path, tensors, manifest, given)
        assert json.loads((path / "probe.json").read_text()) == first
    (path / "probe.json").write_text("")
    revision.write_revision(path, tensors, manifest, second)
    assert json.loads((path / "probe.json").read_text()) == second
    revision.write_revision(path, tensors, manifest, second | {"dtype": "bfloat16"})
    assert json.loads((path / "probe.json").read_text())["dtype"] == "bfloat16"
    assert {file.name for file in path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "manifest.json", "probe.json",
    }  # fmt: skip
