"""The shapes that stand in for checkpoints on a GPU are whole bases, with a reward that lets groups teach."""

import json
import shutil
from pathlib import Path

import pytest

from engine.base.resident import ensure_base
from engine.problems.verifiers import load_judge
from engine.settings.params import BaseConfig, Paths
from tests.helpers.bench_files import load

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "head_dim": 32,
    "num_key_value_heads": 1, "vocab_size": 512, "moe_intermediate_size": 24, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b"])
def test_a_shape_becomes_a_base(name: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shapes = load("_shapes", monkeypatch)
    shape = shapes.SHAPES[name]
    small = shape | {key: value for key, value in SMALL.items() if key in shape}
    path = shapes.shaped_base(small, tmp_path / name, tiny_base)
    again = shapes.shaped_base(small, tmp_path / name, tmp_path / "not asked for again")
    info = ensure_base(BaseConfig(name=str(path)), Paths(tmp_path))
    assert (again, info.path) == (path, path)
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype" if "torch_dtype" in config else "dtype"]) == (
        shape["model_type"],
        "bfloat16",
    )
    assert [file.name for file in tmp_path.iterdir()] == [name]
    shutil.rmtree(path)


def test_random_answers_earn_what_differs(monkeypatch: pytest.MonkeyPatch):
    load("_shapes", monkeypatch)
    bench = load("concurrency", monkeypatch)
    judge = load_judge(bench.SHAPED["verifier"])
    assert [judge("", "", text) for text in ("ab", "abc")] == [1.0, 0.0]
    assert set(bench.LEAST) == {*bench.TINY, *bench.PACKAGED, *bench.SHAPES}
