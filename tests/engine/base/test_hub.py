"""Bases from the hub: a pinned commit, no code of their own, no word of the token, no other network."""

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import BaseModelError, ConfigError
from engine.settings.params import Params
from tests.helpers.repository import ROOT


@pytest.fixture
def base_with_own_code(tiny_base: Path, tmp_path: Path) -> Path:
    """A base whose configuration names a module that would write a file when it is imported."""
    copy = tmp_path / "base"
    shutil.copytree(tiny_base, copy)
    (copy / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n")
    return copy


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_base_with_code_of_its_own_is_refused_and_nothing_runs(base_with_own_code, file, tmp_path):
    from engine.base.resident import base_config, ensure_base

    settings = json.loads((base_with_own_code / file).read_text())
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": "own.Tokenizer"}
    (base_with_own_code / file).write_text(json.dumps(settings | {"auto_map": own}))
    params = Params.model_validate({"base": {"name": str(base_with_own_code)}, "state_dir": tmp_path})
    for ask in (ensure_base, base_config):
        with pytest.raises(BaseModelError, match=rf"\({file}.*`auto_map`"):
            ask(params.base, params.paths)
    assert not (tmp_path / "was-run").exists()


def test_the_refused_base_would_have_run_its_code(base_with_own_code, tmp_path):
    """The test above proves something: with trust, transformers imports the module."""
    from transformers import AutoConfig

    file = base_with_own_code / "config.json"
    own = {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "mine"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(AttributeError):
        AutoConfig.from_pretrained(base_with_own_code, trust_remote_code=True)
    assert (tmp_path / "was-run").exists()


COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tiny_base: Path) -> list[dict[str, object]]:
    """A hub that has the tiny base under every id; it records what it is asked."""
    import huggingface_hub

    asked: list[dict[str, object]] = []

    def snapshot_download(name: str, **options: object) -> str:
        asked.append({"name": name, **options})
        return str(tiny_base)

    def hf_hub_download(name: str, file: str, **options: object) -> str:
        asked.append({"name": name, "file": file, **options})
        return str(tiny_base / file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return asked


def test_a_hub_id_is_taken_at_its_commit_without_code(hub, tmp_path, tiny_base):
    from engine.base.resident import base_config, base_digest, ensure_base

    params = Params.model_validate({"base": {"name": "Qwen/Qwen3-0.6B", "revision": COMMIT}})
    info = ensure_base(params.base, params.paths)
    assert (info.name, info.digest) == ("Qwen3-0.6B", base_digest(tiny_base))
    assert base_config(params.base, params.paths)["model_type"] == "qwen3"
    assert [(call["name"], call["revision"]) for call in hub] == [("Qwen/Qwen3-0.6B", COMMIT)] * 2
    patterns = hub[0]["allow_patterns"]
    assert not any(Path(name).match(pattern) for name in ("model.py", "pytorch_model.bin", "x.pt")
                   for pattern in patterns)  # fmt: skip
    # The hub's library finds the token by itself; it never passes through our hands.
    assert not any("token" in call for call in hub)


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12]])
def test_a_hub_id_without_a_whole_commit_is_refused(hub, revision, tmp_path):
    from engine.base.resident import base_config, ensure_base
    from engine.settings.params import load_params

    file = tmp_path / "params.yaml"
    file.write_text(f"base: {{name: Qwen/Qwen3-0.6B, revision: {json.dumps(revision)}}}")

    def take(ask) -> None:
        params = load_params(file)
        ask(params.base, params.paths)

    for ask in (ensure_base, base_config):
        with pytest.raises(ConfigError, match=r"base\.revision"):
            take(ask)
    assert hub == []


@pytest.mark.parametrize(
    ("kind", "help"),
    [("GatedRepoError", "terms"), ("RevisionNotFoundError", "commit"),
     ("LocalEntryNotFoundError", "hub id")],
)  # fmt: skip
def test_what_the_hub_refuses_is_told_without_its_words(monkeypatch, tmp_path, kind, help):
    """An error of the hub's library may quote the request, and with it the token."""
    import huggingface_hub
    from huggingface_hub import errors

    from engine.base.resident import ensure_base

    def refuse(*args: object, **options: object) -> str:
        error = getattr(errors, kind)
        raise error.__new__(error, "authorization: Bearer hf_secret")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    params = Params.model_validate({"base": {"name": "Qwen/Qwen3-0.6B", "revision": COMMIT}})
    with pytest.raises(BaseModelError, match=f"{kind}.*{help}") as error:
        ensure_base(params.base, params.paths)
    assert "hf_secret" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_a_download_that_broke_off_names_the_shard(tiny_base, tmp_path):
    from engine.base.resident import ensure_base

    copy = tmp_path / "base"
    shutil.copytree(tiny_base, copy)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    params = Params.model_validate({"base": {"name": str(copy)}})
    with pytest.raises(BaseModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        ensure_base(params.base, params.paths)


def test_only_a_hub_id_may_use_the_network(tiny_base):
    from engine.services.lifecycle import environment

    offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"}
    for name in ("tiny-dense", str(tiny_base)):
        assert offline <= set(environment(Params.model_validate({"base": {"name": name}})))
    pinned = Params.model_validate({"base": {"name": "Qwen/Qwen3-0.6B", "revision": COMMIT}})
    assert not offline & set(environment(pinned))


@pytest.mark.services
def test_a_token_is_in_no_file_of_the_services(monkeypatch, tmp_path):
    """Children inherit it; neither the settings that they are given nor the supervisor's file hold it."""
    import os

    from engine.services.lifecycle import environment
    from engine.services.supervisor import Supervisor

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    params = Params.model_validate({"state_dir": tmp_path})
    assert "hf_secret" not in json.dumps(params.model_dump(mode="json")) + json.dumps(environment(params))
    supervisor = Supervisor(tmp_path, tmp_path)
    wait = "import os, time; assert os.environ['HF_TOKEN']; time.sleep(600)"
    try:
        supervisor.spawn({"child": ("-c", wait)}, os.environ | environment(params), os.getpid(), "settings")
        supervisor.start("child")
    finally:
        supervisor.stop()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if b"hf_secret" in file.read_bytes()]


def test_no_line_of_the_product_trusts_a_bases_code():
    root = ROOT
    files = [file for package in ("engine", "tasks", "flows") for file in (root / package).rglob("*.py")]
    said = [line for file in files for line in file.read_text().splitlines() if "trust_remote_code" in line]
    assert any("trust_remote_code=False" in line for line in said)
    assert not [line for line in said if "trust_remote_code=True" in line.replace(" ", "")]
    assert not [file for file in files if '"--trust-remote-code"' in file.read_text()]
