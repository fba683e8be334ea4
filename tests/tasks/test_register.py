"""Registration: one version a digest, whole or absent, and the download is the adapter itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from mlflow import MlflowClient
from peft import PeftModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.adapters.revision import make_manifest, read_revision, write_revision
from engine.errors import AdapterError, ConfigError, ServiceError
from engine.settings.params import Params
from engine.settings.services import MlflowConfig
from tasks import flavor, tracking
from tasks import register as registration
from tasks.register import register, run_of_session
from tests.helpers.history import step_row
from tests.helpers.live import free_port

BASE = "b" * 64
TARGETS = ("q_proj", "down_proj")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real MLflow server on SQLite; yields (root, port)."""
    root, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
               "--workers", "1", "--backend-store-uri", f"sqlite:///{root}/mlflow.db",
               "--artifacts-destination", str(root / "artifacts"), "--serve-artifacts"]  # fmt: skip
    # As in engine/services/lifecycle.py: without jobs, whose processes would import MLflow one by one.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while not answers(port):
            assert process.poll() is None, (root / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield root, port
    finally:
        # The server is the leader of its own group, so its worker ends with it.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def params(server, tmp_path):
    return Params(state_dir=tmp_path / "state", mlflow=MlflowConfig(port=server[1]))


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def make_revision(
    root: Path, base, policy: str, seed: int = 0, parent: str | None = None, **settings: object
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if name.endswith(TARGETS):
            size_out, size_in = module.weight.shape
            tensors[f"{name}.lora_A"] = torch.randn(2, size_in, generator=generator)
            tensors[f"{name}.lora_B"] = torch.randn(size_out, 2, generator=generator)
    config = {"lr": 0.003, "task": "addition", **settings}
    manifest = make_manifest(
        tensors,
        policy=policy,
        base_digest=BASE,
        rank=2,
        targets=TARGETS,
        step=40,
        parent=parent,
        config=config,
    )
    return write_revision(root / policy / manifest.digest[:12], tensors, manifest, {"prompts": []})


CURVE = [{"step": step, "reward": step / 4, "importance_ratio": 1.0, "session": "s"} for step in (1, 2, 3)]


def test_a_version_carries_the_tags_and_the_curve(params, base, tmp_path):
    directory = make_revision(tmp_path, base, "tags", parent="a" * 64)
    version = register(params, "tags", directory, CURVE)
    client = MlflowClient(params.url("mlflow"), params.url("mlflow"))
    found = client.get_model_version("tags", str(version))
    manifest = read_revision(directory)[1]
    expected = {"digest": manifest.digest, "base": BASE, "parent": "a" * 64, "rank": "2", "step": "40"}
    assert {name: found.tags[f"graftwork.{name}"] for name in expected} == expected
    history = client.get_metric_history(found.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    run = client.get_run(found.run_id)
    assert run.data.params == {"lr": "0.003", "task": "addition"}
    assert run.data.tags["graftwork.mkl_cbwr"] == os.environ["MKL_CBWR"]
    assert run.info.status == "FINISHED"


def test_every_number_of_every_step_is_a_point_of_the_runs_metrics(params, base, tmp_path):
    curve = [step_row(step) for step in range(1, 61)]
    curve[40] |= {"kl": None, "masked": {"outlier": 1}, "held_out_loss": 1.25}
    directory = make_revision(tmp_path, base, "curve", seed=5)
    version = register(params, "curve", directory, curve)
    client = MlflowClient(params.url("mlflow"), params.url("mlflow"))
    run_id = client.get_model_version("curve", str(version)).run_id
    words = {"policy", "session", "step", "digest", "loss_fn", "collapse", "masked", "verifier_faults"}
    expected = {name: [row[name] for row in curve] for name in curve[0] if name not in words}
    for name in ("masked", "verifier_faults"):
        expected |= {
            f"{name}/{reason}": [row[name].get(reason) for row in curve] for reason in curve[0][name]
        }
    assert set(client.get_run(run_id).data.metrics) == set(expected)
    for name, values in expected.items():
        points = [(step, value) for step, value in enumerate(values, start=1) if value is not None]
        assert [(point.step, point.value) for point in client.get_metric_history(run_id, name)] == points


def test_a_run_that_trains_is_in_mlflow_and_becomes_its_revisions(params, base, tmp_path, monkeypatch):
    """It fails after its third step, goes on, and is registered with all of them, each once."""
    monkeypatch.setattr(tracking, "EVERY_S", 0.05)
    # A server on a busy machine may need more than the ten seconds for which a training waits.
    monkeypatch.setattr(tracking, "LAST_S", 60.0)
    client = MlflowClient(params.url("mlflow"), params.url("mlflow"))
    rows = [step_row(step, "tracked", "tracked-1") for step in (1, 2, 3, 4)]

    def seen() -> tuple[str, str, list[int]] | None:
        run = run_of_session(client, "tracked", "tracked-1")
        points = client.get_metric_history(run.info.run_id, "reward") if run else ()
        return (run.info.run_id, run.info.status, [point.step for point in points]) if run else None

    def trains(*steps: int, fails: bool = False) -> None:
        with tracking.Tracking(params.url("mlflow"), "tracked") as track:
            track(rows[steps[0] - 1])
            deadline = time.monotonic() + 60
            while not (found := seen()) or (found[1], found[2][-1:]) != ("RUNNING", [steps[0]]):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            for step in steps[1:]:
                track(rows[step - 1])
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trains(1, 2, 3, fails=True)
    run_id, status, steps = seen()
    assert (status, steps) == ("FAILED", [1, 2, 3])
    trains(4)
    assert seen()[0] == run_id
    directory = make_revision(tmp_path, base, "tracked", seed=6, session="tracked-1")
    version = client.get_model_version("tracked", str(register(params, "tracked", directory, rows)))
    assert version.run_id == run_id
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["graftwork.digest"]) == (
        "FINISHED",
        read_revision(directory)[1].digest,
    )
    assert [point.step for point in client.get_metric_history(run_id, "reward")] == [1, 2, 3, 4]
    # A session that goes on beyond its revision has a run of its own again.
    assert run_of_session(client, "tracked", "tracked-1") is None


def test_training_goes_on_while_mlflow_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "EVERY_S", 0.05)
    # So long that only who waits for all of it needs it.
    monkeypatch.setattr(tracking, "LAST_S", 60.0)
    dead = Params(state_dir=tmp_path / "state", mlflow=MlflowConfig(port=free_port()))
    began = time.monotonic()
    with tracking.Tracking(dead.url("mlflow"), "sums") as track:
        for step in (1, 2):
            track(step_row(step))
            time.sleep(0.2)
    assert time.monotonic() - began < tracking.LAST_S


def test_the_same_digest_is_the_same_version_and_another_is_the_next(params, base, tmp_path):
    first, second = (make_revision(tmp_path, base, "twice", seed) for seed in (1, 2))
    versions = [register(params, "twice", directory, CURVE) for directory in (first, first, second, first)]
    assert versions == [1, 1, 2, 1]
    client = MlflowClient(params.url("mlflow"), params.url("mlflow"))
    assert len(client.search_model_versions("name = 'twice'")) == 2


def test_two_attempts_at_once_make_one_version(params, base, tmp_path):
    directory = make_revision(tmp_path, base, "race")
    versions = []
    threads = [
        threading.Thread(target=lambda: versions.append(register(params, "race", directory)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == [1, 1, 1]


def test_an_attempt_cut_before_the_version_leaves_none_and_the_retry_goes_on(
    params, base, tmp_path, monkeypatch
):
    directory = make_revision(tmp_path, base, "cut")
    client = MlflowClient(params.url("mlflow"), params.url("mlflow"))
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_registered_models", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            register(params, "cut", directory, CURVE)
    assert client.search_registered_models("name = 'cut'") == []
    assert register(params, "cut", directory, CURVE) == 1
    experiment = client.get_experiment_by_name(registration.EXPERIMENT).experiment_id
    runs = client.search_runs([experiment], "tags.`graftwork.policy` = 'cut'")
    assert len(runs) == 1
    assert len(client.get_metric_history(runs[0].info.run_id, "reward")) == 3
    models = client.search_logged_models([experiment], "tags.`graftwork.policy` = 'cut'")
    assert len(models) == 1


def test_a_downloaded_version_opens_in_plain_peft_and_computes_the_same(params, base, tmp_path):
    directory = make_revision(tmp_path, base, "opens")
    version = register(params, "opens", directory)
    request = ("opens", version, tmp_path / "fetched", params.url("mlflow"))
    fetched = flavor.load_model(*request)
    assert flavor.load_model(*request) == fetched
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == ["opens"]

    ids = torch.tensor([[1, 2, 3, 4]])
    weights = read_revision(directory)[0]
    expected = Qwen3ForCausalLM(base.config).eval()
    expected.load_state_dict(base.state_dict())
    modules = dict(expected.named_modules())
    with torch.no_grad():
        before = base(ids).logits
        for key in [key for key in weights if key.endswith("lora_A")]:
            name = key.removesuffix(".lora_A")
            modules[name].weight += weights[f"{name}.lora_B"] @ weights[key]
        merged = expected(ids).logits
        copy = Qwen3ForCausalLM(base.config).eval()
        copy.load_state_dict(base.state_dict())
        loaded = PeftModel.from_pretrained(copy, fetched)(ids).logits
    torch.testing.assert_close(loaded, merged, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(loaded, before, atol=1e-2)


def test_the_model_file_names_no_path_of_this_machine(base, tmp_path):
    directory = make_revision(tmp_path, base, "paths")
    flavor.save_model(directory, tmp_path / "model")
    text = "".join(
        path.read_text() for path in (tmp_path / "model").iterdir() if path.suffix != ".safetensors"
    )
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    described = yaml.safe_load((tmp_path / "model" / "MLmodel").read_text())["flavors"]["graftwork"]
    assert described["digest"] == read_revision(directory)[1].digest


def test_an_altered_artifact_is_refused_and_leaves_nothing(params, server, base, tmp_path):
    directory = make_revision(tmp_path, base, "altered")
    version = register(params, "altered", directory)
    manifests = (server[0] / "artifacts").rglob("manifest.json")
    stored = next(path for path in manifests if json.loads(path.read_text())["policy"] == "altered")
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"rank": 1}))
    with pytest.raises(AdapterError, match="digest"):
        flavor.load_model("altered", version, tmp_path / "fetched", params.url("mlflow"))
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.long
def test_a_dead_registry_is_a_sentence_within_the_patience(base, tmp_path):
    port = free_port()
    dead = Params(state_dir=tmp_path / "state", mlflow=MlflowConfig(port=port))
    directory = make_revision(tmp_path, base, "dead")
    started = time.monotonic()
    with pytest.raises(ServiceError, match=r"MLflow.*answer"):
        register(dead, "dead", directory, patience_s=1)
    assert time.monotonic() - started < 10
    assert read_revision(directory)[1].policy == "dead"


def test_a_registry_that_comes_back_is_found(server, base, tmp_path):
    port = free_port()
    late = Params(state_dir=tmp_path / "state", mlflow=MlflowConfig(port=port))
    directory = make_revision(tmp_path, base, "late")
    threading.Thread(target=forward_later, args=(port, server[1], 1.0), daemon=True).start()
    assert register(late, "late", directory, patience_s=120) == 1


def forward_later(port, target, delay_s):
    """Listen on `port` after `delay_s` and hand every connection on to `target`."""
    time.sleep(delay_s)
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            client, _ = listener.accept()
            upstream = socket.create_connection(("127.0.0.1", target))
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=copy_bytes, args=(source, sink), daemon=True).start()


def copy_bytes(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)


def test_a_revision_of_another_policy_is_refused(base, tmp_path):
    directory = make_revision(tmp_path, base, "mine")
    with pytest.raises(ConfigError, match=r"'mine'.*'yours'"):
        register(Params(state_dir=tmp_path / "state"), "yours", directory)
