"""The trainer as a real process: killed and restarted, polled, one writer a session, revisions published."""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
import torch

from engine.adapters import packed, revision
from engine.catalog.catalog import Catalog, migrate
from engine.errors import (
    AdapterError,
    BaseModelError,
    ConfigError,
    Conflict,
    NotFound,
    PortInUse,
    ServiceError,
)
from engine.publishing.publish import stored_tensors
from engine.quality.probe import from_json
from engine.security.credentials import credential
from engine.settings.params import Paths, load_params
from engine.store.segments import Location, Store
from engine.training.service.client import TrainerClient
from engine.training.service.protocol import Datum
from tests.helpers.access_matrix import ROLE_SETS, TRAINER, Names, refusals
from tests.helpers.live import free_port
from tests.helpers.trainer_service import ADAM, SETTINGS, Service, data, step


@pytest.fixture(scope="module")
def service(tiny_base, tmp_path_factory):
    state = tmp_path_factory.mktemp("trainer")
    file = state / "params.json"
    settings = {"state_dir": str(state), "base": {"name": str(tiny_base)}, "trainer": {"port": free_port()}}
    file.write_text(json.dumps(settings))
    service = Service(load_params(file), file)
    service.start()
    assert service.client.health()["status"] == "ok"
    yield service
    service.stop()


def test_a_killed_trainer_goes_on_bit_for_bit(service):
    client = service.client
    whole = client.create_session("whole", "sums", holder="a", **SETTINGS)
    for number in range(4):
        step(client, whole, number)
    want = client.export(whole)

    cut = client.create_session("cut", "sums", holder="a", **SETTINGS)
    for number in range(2):
        step(client, cut, number)
    client.forward_backward(cut, data(2))
    service.kill()
    service.start()
    with pytest.raises(ServiceError, match=r"0 calls.*step 2"):
        client.optim_step(cut, ADAM)
    cut = client.create_session("cut", "sums", holder="a", **SETTINGS)
    assert (cut.step, cut.position) == (2, 1)
    for number in range(2, 4):
        step(client, cut, number)
    assert client.export(cut).digest == want.digest


def test_the_matrix_of_the_live_trainer(service):
    """No key of the catalog opens it, not even an admin's: it has a credential of its own."""
    from engine.training.service.app import make_app

    routes = {(method, route.path) for route in make_app(None).routes for method in route.methods}
    assert routes == {("GET", "/health"), *((one, path.replace("/x", "/{id}")) for one, path in TRAINER)}
    migrate(service.params.paths.catalog_url)
    with closing(Catalog(service.params.paths.catalog_url)) as catalog:
        keys = {who: catalog.keys.create("acme", roles) for who, roles in ROLE_SETS.items()}
        keys["admin"] = catalog.keys.create("root", "admin")
    url, own = service.params.url("trainer"), credential(service.params.paths, "trainer")
    for key in (None, "0" * 48, *keys.values()):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=url, headers=headers, timeout=20) as http:
            assert refusals(http, TRAINER, Names("acme-sums", "their-sums", "absent-sum")) == []
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {own}"}, timeout=20) as http:
        for method, path in TRAINER:
            assert http.request(method, path, json={}).status_code in (200, 400, 404), (method, path)


def test_a_step_is_in_the_metrics_once(service):
    client = service.client
    session = client.create_session("measured", "measured", holder="a", **SETTINGS)
    answer = client.forward_backward(session, data(1))["metrics"]
    before = metrics(service)
    record = {"reward": 0.625, "tokens": answer["tokens"], "masked": {"outlier": 2}}
    for _ in range(2):
        client.optim_step(session, ADAM, record=record, request_id="measured-step")
    after = metrics(service)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert after['graftwork_policy_reward{policy="measured"}'] == 0.625
    assert grown["graftwork_trainer_steps_total"] == 1
    assert grown["graftwork_trainer_tokens_total"] == answer["tokens"] == 16
    assert grown['graftwork_trainer_masked_tokens_total{reason="outlier"}'] == 2
    assert grown['graftwork_trainer_operations_total{kind="optim_step",outcome="done"}'] == 1
    assert after["graftwork_trainer_peak_memory_bytes"] >= answer["peak_memory"] > 1 << 26


def metrics(service) -> dict[str, float]:
    """Return the trainer's metrics as Prometheus reads them, by name and labels."""
    answer = service.client.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_repeated_request_is_one_operation(service):
    client = service.client
    session = client.create_session("again", "sums", holder="a", **SETTINGS)
    client.forward_backward(session, data(1), request_id="gradients")
    assert client.optim_step(session, ADAM, request_id="the-step")["step"] == 1
    assert client.optim_step(session, ADAM, request_id="the-step")["step"] == 1
    answer = client.http.get("/operations/the-step").json()
    assert (answer["state"], answer["result"]["step"]) == ("done", 1)
    assert client.http.get("/operations/unknown").status_code == 404


def test_one_writer_a_session(service):
    client = service.client
    first = client.create_session("shared", "sums", holder="a", **SETTINGS)
    with pytest.raises(Conflict, match="written by 'a'"):
        client.create_session("shared", "sums", holder="b", **SETTINGS)
    second = client.create_session("shared", "sums", holder="a", **SETTINGS)
    with pytest.raises(Conflict, match="another writer now"):
        step(client, first, 1)
    assert step(client, second, 1)["step"] == 1


def test_sessions_are_listed(service):
    session = service.client.create_session("listed", "sums", holder="a", **SETTINGS)
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "status",
        "--sessions",
        "--json",
        "--params",
        str(service.file),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    row = next(row for row in json.loads(run.stdout) if row["session"] == session.session)
    assert (row["policy"], row["step"], row["resident"], row["holder"]) == ("sums", 0, True, "a")
    assert row["bytes"] > 0


def test_a_revision_is_published_by_three_routes_alike(service):
    """Directory, packed bytes in the store and catalog row hold the same adapter."""
    client, paths = service.client, Paths(service.params.state_dir)
    session = client.create_session("exported", "sums", holder="a", **SETTINGS)
    step(client, session, 1)
    snapshot = client.export(session)
    exported = client.export(session, "revision", probe_prompts=[[5, 6, 7]], probe_tokens=4)
    assert snapshot.digest == exported.digest
    tensors, manifest = revision.read_revision(exported.directory, session.base)
    row = Catalog(paths.catalog_url).revisions.get("sums", exported.digest)
    assert (row.state, row.expires_at, manifest.step) == ("exported", None, 1)
    payload = Store(paths.store).read(Location(row.segment, row.offset, row.length, row.checksum))
    layout = packed.PackedLayout.from_json(Catalog(paths.catalog_url).layouts.get(row.layout))
    stored = packed.unpack(packed.Packed(layout, torch.frombuffer(bytearray(payload), dtype=torch.uint8)))
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[key], tensors[key]) for key in stored)
    assert any(value.abs().max() > 0 for key, value in stored.items() if key.endswith("lora_B"))
    probe = json.loads((exported.directory / "probe.json").read_text())
    assert probe["base_digest"] == session.base
    assert probe["rows"][0]["adapter"] != probe["rows"][0]["base"]


def test_an_export_replaces_bytes_that_were_damaged(service):
    client, paths = service.client, Paths(service.params.state_dir)
    session = client.create_session("damaged", "sums", holder="a", **SETTINGS)
    step(client, session, 2)
    digest = client.export(session).digest
    catalog, store = Catalog(paths.catalog_url), Store(paths.store)
    before = catalog.revisions.get("sums", digest)
    whole = stored_tensors(catalog, store, before)
    with store.path(before.segment).open("r+b") as file:
        file.seek(before.offset + before.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(AdapterError, match="damaged"):
        stored_tensors(catalog, store, before)
    assert client.export(session).digest == digest
    after = catalog.revisions.get("sums", digest)
    assert (after.segment, after.offset) != (before.segment, before.offset)
    stored = stored_tensors(catalog, store, after)
    assert all(torch.equal(stored[key], whole[key]) for key in whole)


def test_a_revision_without_a_session_gets_the_probe_that_its_session_gave_it(service, tmp_path):
    client = service.client
    session = client.create_session("probed", "sums", holder="a", **SETTINGS)
    step(client, session, 9)
    prompts = [[5, 6, 7], [9, 30, 31, 32]]
    exported = client.export(session, "revision", probe_prompts=prompts, probe_tokens=4)
    want = from_json(json.loads((exported.directory / "probe.json").read_text()))
    assert client.probe_revision("sums", exported.digest, prompts, 4) == want
    assert client.probe_revision("sums", exported.digest, prompts, 4, exported.directory) == want
    with pytest.raises(AdapterError, match=f"{exported.digest}.*0000"):
        client.probe_revision("sums", "0" * 64, prompts, 4, exported.directory)
    with pytest.raises(NotFound, match="0000"):
        client.probe_revision("sums", "0" * 64, prompts)
    foreign, manifest = revision.read_revision(exported.directory)
    manifest = replace(manifest, base_digest="f" * 64)
    manifest = replace(manifest, digest=revision.digest(foreign, 4, manifest.targets, "f" * 64))
    directory = revision.write_revision(tmp_path / "foreign", foreign, manifest, {})
    with pytest.raises(BaseModelError, match="base ffffffffffff"):
        client.probe_revision("sums", manifest.digest, prompts, directory=directory)


def test_losses_and_their_settings_cross_the_wire(service):
    client = service.client
    session = client.create_session("losses", "sums", holder="a", **SETTINGS)
    config = {"kl": 0.1, "clip_high": 0.3, "tis": True, "geometric": [0.5, 2.0]}
    sampled = client.forward_backward(session, data(1), "gspo", config)["metrics"]
    assert sampled["masked"].keys() == {"geometric"}
    assert (sampled["kl"], sampled["tokens"]) == (0.0, 16)
    bare = [
        Datum(
            model_input=datum.model_input, loss_fn_inputs={name: datum.loss_fn_inputs[name] for name in names}
        )
        for datum in data(1)
        for names in (("target_tokens", "weights"),)
    ]
    found = client.forward_backward(session, bare, "dpo")["metrics"]
    # A fresh adapter is the base: nothing is preferred yet.
    assert found["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found["importance_ratio"] is None
    assert client.optim_step(session, ADAM)["step"] == 1
    with pytest.raises(ConfigError, match=r"Sample 0.*0 log-probabilities"):
        client.forward_backward(session, bare, "gspo")
    with pytest.raises(ConfigError, match=r"dpo.*setting kl"):
        client.forward_backward(session, bare, "dpo", {"kl": 1})


def test_faults_are_sentences(service):
    client = service.client
    session = client.create_session("faults", "sums", holder="a", **SETTINGS)
    with pytest.raises(ConfigError, match="no loss 'hope'"):
        client.forward_backward(session, data(1), loss="hope")
    with pytest.raises(ConfigError, match="needs prompts"):
        client.export(session, "revision")
    with pytest.raises(ConfigError, match="no projections z_proj"):
        client.create_session("faults-2", "sums", holder="a", **{**SETTINGS, "targets": ["z_proj"]})
    with pytest.raises(NotFound, match="no policy 'unknown'"):
        client.create_session("faults-3", "unknown", holder="a", **{**SETTINGS, "policy_config": None})
    started = time.monotonic()
    with pytest.raises(ServiceError, match="does not answer"):
        TrainerClient(f"http://127.0.0.1:{free_port()}", patience_s=0.5).health()
    assert time.monotonic() - started < 10


def test_a_taken_port_is_a_sentence(service):
    command = [sys.executable, "-m", "engine.training.service.app", "--params", str(service.file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert run.returncode == PortInUse.exit_code
    assert "`trainer.port`" in run.stderr
    assert "Traceback" not in run.stderr
