"""Bases: built the same from the same seed, published whole or not at all, refused with a sentence."""

import shutil
from dataclasses import replace

import pytest

from engine import base as bases
from engine.config import BaseConfig, Paths
from engine.errors import BaseModelError

SMALL = replace(bases.RECIPES["tiny-dense"], steps=3, problems=256, batch=8)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(bases.RECIPES, "tiny-dense", SMALL)


def test_the_same_seed_gives_the_same_base(small, tmp_path):
    one, two, other = (
        bases.ensure_base(BaseConfig(name="tiny-dense", seed=seed), Paths(tmp_path / name))
        for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    assert one.digest == two.digest != other.digest
    assert one.path.name == two.path.name != other.path.name


def test_a_base_is_built_once(small, tmp_path, monkeypatch):
    config, paths = BaseConfig(name="tiny-dense", seed=1), Paths(tmp_path)
    first = bases.ensure_base(config, paths)
    monkeypatch.setattr(bases, "build", lambda *_: pytest.fail("built again"))
    assert bases.ensure_base(config, paths) == first


def test_a_build_that_breaks_off_leaves_nothing(small, tmp_path):
    def interrupt(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    config, paths = BaseConfig(name="tiny-dense", seed=1), Paths(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bases.ensure_base(config, paths, interrupt)
    assert [path for path in paths.bases.iterdir() if path.is_dir()] == []
    assert bases.ensure_base(config, paths).path.is_dir()


def test_a_tiny_base_is_a_real_one(tiny_base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 1e6
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    text = bases.prompt_text(tokenizer, "What is 12 + 34?")
    assert tokenizer.decode(bases.prompt_ids(tokenizer, "What is 12 + 34?")) == text


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer"])
def test_an_incomplete_directory_names_what_it_lacks(missing, tiny_base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    for file in copy.glob(f"{missing}*"):
        file.unlink()
    wanted = {"model.safetensors": "weights"}.get(missing, missing)
    with pytest.raises(BaseModelError, match=wanted):
        bases.ensure_base(BaseConfig(name=str(copy)), Paths(tmp_path))


def test_a_base_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BaseModelError, match="neither a local directory nor"):
        bases.ensure_base(BaseConfig(name=str(tmp_path / "gone")), Paths(tmp_path))
