"""What peft saves is served as peft computes it; what peft computes in another way is not imported."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, base_digest
from engine.catalog.opening import open_catalog
from engine.errors import AdapterError, NotFound
from engine.publishing import peft_proof
from engine.publishing.foreign import inspect, publish, read_adapter
from engine.publishing.peft_process import logprobs, opened
from engine.publishing.peft_proof import PeftProof, compare, left_out_reason
from engine.quality.probe import Probe, ProbeRow, gaps
from engine.settings.params import Params
from tests.helpers.live import eventually
from tests.helpers.parity import merge

ROWS = [[5, 9, 33, 70, 12, 41, 8], [7, 7, 100, 3]]
GROUPS = r".*\.layers\.1\..*(q_proj|k_proj)$"
ALL = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# Settings with which peft trains an adapter that is served as peft computes it.
SETTINGS = {
    "plain": {},
    "of ranks by groups": {"rank_pattern": {GROUPS: 4}},
    "of alphas by groups": {"alpha_pattern": {GROUPS: 64}},
    "of both, by the root": {"use_rslora": True, "rank_pattern": {GROUPS: 2}, "alpha_pattern": {"v_proj": 1}},
    "of some layers": {"layers_to_transform": [0, 2], "target_modules": ["q_proj", "up_proj"]},
    "without some modules": {"exclude_modules": ["down_proj"]},
    "begun as gaussian": {"init_lora_weights": "gaussian"},
    "begun as orthogonal": {"init_lora_weights": "orthogonal"},
    "of dropout and a half alpha": {"lora_dropout": 0.1, "lora_alpha": 0.5},
}


def model_of(base: Path):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def trained(base: Path, directory: Path, **settings):
    """Let peft save an adapter; in place of a training its factors get noise."""
    torch.manual_seed(3)
    model = get_peft_model(model_of(base), LoraConfig(**{**ALL, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(directory)
    return model.eval()


def served(base: Path, directory: Path) -> list[list[float]]:
    """Compute what the canonical tensors mean: transformers' model with B @ A added to its weights."""
    model = model_of(base)
    with torch.no_grad():
        merge(model, read_adapter(directory, BaseShapes.read(base)).tensors)
    return logprobs(model, ROWS)


def changed(directory: Path, copy: Path, **settings) -> Path:
    shutil.copytree(directory, copy)
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return copy


@pytest.fixture(scope="module")
def info(tiny_base) -> BaseInfo:
    return BaseInfo("tiny", tiny_base, base_digest(tiny_base))


@pytest.fixture(scope="module")
def good(tiny_base, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "adapter"
    trained(tiny_base, directory)
    return directory


@pytest.fixture(scope="module")
def plain(tiny_base) -> list[list[float]]:
    return logprobs(model_of(tiny_base), ROWS)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_adapter_of_peft_is_served_as_peft_computes_it(tiny_base, tmp_path, plain, name):
    model = trained(tiny_base, tmp_path, **SETTINGS[name])
    expected = logprobs(model, ROWS)
    assert max(gaps(served(tiny_base, tmp_path), expected)) < 1e-4
    assert max(gaps(plain, expected)) > 1e-3


@pytest.mark.parametrize("value", ["pissa", "olora"])
def test_an_initialization_that_moves_the_base_is_served_after_pefts_own_conversion(
    tiny_base, tmp_path, plain, value
):
    """Saved before any step it means the base, which its factors alone would not be."""
    torch.manual_seed(3)
    model = get_peft_model(model_of(tiny_base), LoraConfig(**ALL, init_lora_weights=value)).eval()
    model.save_pretrained(tmp_path / "raw")
    assert max(gaps(logprobs(model, ROWS), plain)) < 1e-3
    with pytest.raises(AdapterError, match=r"init_lora_weights.*path_initial_model_for_weight_conversion"):
        read_adapter(tmp_path / "raw", BaseShapes.read(tiny_base))
    config = model.peft_config["default"]
    config.init_lora_weights = True
    model.save_pretrained(tmp_path / "first")
    config.init_lora_weights = value
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    expected = logprobs(model, ROWS)
    model.save_pretrained(tmp_path / "done", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    assert max(gaps(served(tiny_base, tmp_path / "done"), expected)) < 1e-3
    assert max(gaps(plain, expected)) > 0.01


def test_fan_in_fan_out_changes_nothing_on_linear_modules(tiny_base, tmp_path, good):
    """peft takes it back where a module is not a Conv1D, with a warning."""
    adapter = changed(good, tmp_path / "a", fan_in_fan_out=True)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        model, unused = opened(str(tiny_base), str(adapter), "float32")
    assert unused == []
    assert max(gaps(served(tiny_base, adapter), logprobs(model, ROWS))) < 1e-4


def test_an_alora_is_refused_since_it_would_be_always_on(tiny_base, tmp_path, good):
    changed(good, tmp_path / "a", alora_invocation_tokens=[5, 6, 7])
    with pytest.raises(AdapterError, match=r"alora_invocation_tokens to \[5, 6, 7\].*always on"):
        read_adapter(tmp_path / "a", BaseShapes.read(tiny_base))


# The proof


def probe_of(base: Path, directory: Path, rows: list[list[float]]) -> Probe:
    plain = logprobs(model_of(base), ROWS)
    parts = zip(ROWS, rows, plain, strict=True)
    return Probe("d", "b", "float32", tuple(ProbeRow(tuple(a), tuple(b), tuple(c)) for a, b, c in parts))


@pytest.mark.parametrize(
    "settings",
    [{"layers_to_transform": [1]}, {"exclude_modules": ["down_proj"]}, {"target_modules": ["q_proj"]}],
)
def test_a_tensor_that_peft_does_not_use_is_named(tiny_base, tmp_path, good, settings):
    """Graftwork would apply every tensor; nothing but peft says that its author never did."""
    adapter = changed(good, tmp_path / "a", **({"target_modules": ["down_proj", "q_proj"]} | settings))
    model, unused = opened(str(tiny_base), str(adapter), "float32")
    probe = probe_of(tiny_base, adapter, served(tiny_base, adapter))
    with pytest.raises(AdapterError, match=r"differ by up to 0\.\d+ nats.*does not use the tensor .*lora_"):
        compare(probe, logprobs(model, ROWS), unused)


def test_the_worst_place_is_named(tiny_base, good):
    rows = served(tiny_base, good)
    probe = probe_of(tiny_base, good, rows)
    assert "within 0 nats" in compare(probe, rows)
    rows[1][2] += 0.5
    with pytest.raises(
        AdapterError, match=r"up to 0\.5 nats \(tolerance 0\.001\), most at token 3 of prompt 2"
    ):
        compare(probe, rows)
    rows[1][2] = float("nan")
    with pytest.raises(AdapterError, match="prompt 2"):
        compare(probe, rows)


def test_peft_gets_the_two_files_alone_under_its_own_names(tmp_path, good):
    adapter = changed(good, tmp_path / "a")
    file = adapter / "adapter_model.safetensors"
    names = load_file(file)
    save_file({name.replace(".weight", ".default.weight"): value for name, value in names.items()}, file)
    for source, is_link in ((good, True), (adapter, False)):
        (folder := tmp_path / f"of-{source.name}-{is_link}").mkdir()
        peft_proof.hand_over(source, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", file.name]
        assert load_file(folder / file.name).keys() == names.keys()
        assert (folder / file.name).is_symlink() is is_link


def test_nothing_is_published_of_an_adapter_that_is_not_proven(tiny_base, tmp_path, good, monkeypatch):
    """What peft's process answers is made up here."""
    params = Params(state_dir=tmp_path / "state", base={"name": str(tiny_base)})
    foreign, base = inspect(params, good)
    rows = served(tiny_base, good)
    probe = probe_of(tiny_base, good, rows)
    monkeypatch.setattr(PeftProof, "__init__", lambda *_: None)
    monkeypatch.setattr(PeftProof, "__exit__", lambda *_: None)
    monkeypatch.setattr(
        PeftProof, "check", lambda self, probe: compare(probe, [row.base for row in probe.rows])
    )
    with pytest.raises(AdapterError, match="something else"):
        publish(params, good, foreign, base, "afar", "local", lambda *_: probe)
    assert not list(tmp_path.glob("state/revisions/*"))
    assert not params.paths.has_catalog
    monkeypatch.setattr(PeftProof, "check", lambda self, probe: compare(probe, rows))
    assert publish(params, good, foreign, base, "afar", "local", lambda *_: probe).config["import"]["peft"]


@pytest.mark.slow
def test_an_import_of_which_peft_computes_something_else_publishes_nothing(tiny_base, tmp_path, good):
    """In peft's own process, with a state dict's names, which are its own names for peft."""
    adapter = changed(good, tmp_path / "a", layers_to_transform=[1], target_modules=["q_proj", "up_proj"])
    file = adapter / "adapter_model.safetensors"
    tensors = {name.replace(".weight", ".default.weight"): value for name, value in load_file(file).items()}
    save_file(tensors, file)
    params = Params(state_dir=tmp_path / "state", base={"name": str(tiny_base)})
    foreign, base = inspect(params, adapter)
    probe = probe_of(tiny_base, adapter, served(tiny_base, good))
    with pytest.raises(AdapterError, match="does not use the tensor"):
        publish(params, adapter, foreign, base, "afar", "local", lambda *_: probe)
    assert not list(tmp_path.glob("state/revisions/*"))
    with pytest.raises(NotFound), open_catalog(params.paths) as catalog:
        catalog.policies.get("afar")


def test_a_proof_has_a_time_limit_and_leaves_no_process(tiny_base, info, good):
    probe = probe_of(tiny_base, good, served(tiny_base, good))
    with PeftProof(info, good, "float32") as proof, pytest.raises(AdapterError, match="did not finish"):
        proof.check(probe, limit_s=0.01)
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if is_of_peft(child)]


def is_of_peft(child: psutil.Process) -> bool:
    """Say whether a child computes with peft. Another one may end while it is looked at."""
    with suppress(psutil.NoSuchProcess):
        return "peft_process" in " ".join(child.cmdline())
    return False


def test_pefts_process_ends_with_the_one_that_asked(tmp_path):
    """Before or while it imports torch, which never comes to an end here."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    code = (
        "import os, subprocess, sys, time; "
        "command = [sys.executable, '-m', 'engine.publishing.peft_process', str(os.getpid()), *'abc']; "
        "pipes = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL); "
        "print(subprocess.Popen(command, **pipes).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert eventually(lambda: has_ended(child))


def has_ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_where_a_copy_does_not_fit_the_proof_is_left_out(info, monkeypatch):
    assert left_out_reason(info, "float32", "plain", "dense") is None
    assert "layout megatron-3d" in left_out_reason(info, "float32", "megatron-3d", "Qwen3-MoE")
    assert left_out_reason(info, "float32", "per-expert", "Qwen3-MoE") is None
    monkeypatch.setattr(peft_proof, "free_bytes", lambda: 1 << 29)
    assert "0.50 GiB are free" in left_out_reason(info, "float32", "plain", "dense")
