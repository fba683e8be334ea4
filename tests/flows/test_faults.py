"""Kills in the middle of training, on the real services: nothing is lost, repeated twice or half visible."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from engine.adapters.revision import read_revision
from engine.catalog.opening import whole_catalog
from engine.security.credentials import known_credential
from engine.services import lifecycle as services
from engine.settings.params import Params, load_params
from engine.training.service.client import TrainerClient
from tests.helpers.live import eventually, free_port
from tests.helpers.operated import POLICY, Operated
from tests.helpers.repository import ROOT

STEPS = 12
VICTIMS = ("engine", "trainer", "controller")

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings with one policy for each fault, so that each trains anew."""
    state = tmp_path_factory.mktemp("faults")
    bases = ROOT / ".graftwork" / "bases"
    bases.mkdir(parents=True, exist_ok=True)
    (state / "bases").symlink_to(bases)
    data = yaml.safe_load((ROOT / "params.yaml").read_text())
    recipe = data["policies"]["arithmetic"] | {"steps": STEPS}
    names = [*VICTIMS, "interrupted", "killed", "registry", "both-0", "both-1"]
    data["policies"] = {name: recipe | {"seed": seed} for seed, name in enumerate(names, start=1)}
    data |= {name: {"port": free_port()} for name in (*VICTIMS, "mlflow", "prefect")} | {
        "state_dir": str(state)
    }
    path = state / "settings.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def params(file: Path) -> Iterator[Params]:
    params = load_params(file)
    try:
        subprocess.run(command("up", file), check=True, cwd=ROOT, timeout=600)
        yield params
    finally:
        services.down(params)


def command(*arguments: object) -> list[str]:
    *words, file = map(str, arguments)
    return [sys.executable, "-m", "flows.cli", *words, "--params", file]


def step_of(params: Params, policy: str) -> int:
    with TrainerClient.of(params) as trainer:
        sessions = trainer.health()["sessions"]
    return max((step for name, step in sessions.items() if name.startswith(f"{policy}-")), default=0)


def server_of(params: Params, name: str) -> psutil.Process:
    """Return the service itself, which is its reaper's child."""
    reaper = next(state.pid for state in services.status(params) if state.name == name)
    return psutil.Process(reaper).children()[0]


def assert_whole(params: Params, policy: str) -> None:
    """One exported revision, its directory whole, each step recorded once and on policy."""
    catalog = whole_catalog(params.paths.catalog_url)
    exported = [row for row in catalog.revisions.page(policy) if row.state == "exported"]
    catalog.close()
    assert len(exported) == 1
    assert (exported[0].probe or {})["accepted"] is True
    _, manifest = read_revision(params.paths.revisions / policy / exported[0].digest[:12])
    assert manifest.step == STEPS
    assert len(list((params.paths.revisions / policy).iterdir())) == 1
    url = f"{params.url('controller')}/ledger/train_steps"
    headers = {"authorization": f"Bearer {known_credential(params.paths, 'controller')}"}

    def recorded() -> list[int]:
        rows = httpx.get(url, params={"policy": policy}, timeout=10, headers=headers).json()
        assert all(abs(row["importance_ratio"] - 1) <= 1e-3 for row in rows)
        return sorted(row["step"] for row in rows)

    assert eventually(lambda: recorded() == list(range(1, STEPS + 1))), recorded()


@pytest.mark.parametrize("victim", VICTIMS)
def test_service_killed_in_the_middle_of_training(params: Params, file: Path, victim: str) -> None:
    with subprocess.Popen(command("adapt", victim, file), cwd=ROOT) as adapt:
        assert eventually(lambda: step_of(params, victim) >= 3, 120)
        server_of(params, victim).kill()
        assert adapt.wait(timeout=300) == 0
    assert_whole(params, victim)


@pytest.mark.parametrize(
    ("policy", "number"),
    [("interrupted", signal.SIGINT), ("killed", signal.SIGKILL)],
    ids=["ctrl-c", "kill -9"],
)
def test_flow_ended_in_the_middle_of_training_and_the_next_run_goes_on(
    params: Params, file: Path, policy: str, number: signal.Signals
) -> None:
    with subprocess.Popen(command("adapt", policy, file), cwd=ROOT) as adapt:
        assert eventually(lambda: step_of(params, policy) >= 3, 300)
        os.kill(adapt.pid, number)
        assert adapt.wait(timeout=60) != 0
    reached = step_of(params, policy)
    assert 3 <= reached < STEPS
    assert subprocess.run(command("adapt", policy, file), cwd=ROOT, timeout=300).returncode == 0
    assert_whole(params, policy)


def test_registry_down_at_export_and_the_retry_goes_on(params: Params, file: Path) -> None:
    registry = server_of(params, "mlflow")
    # Stopped, not killed: the supervisor does not start it again, and nobody answers.
    tree = [registry, *registry.children(recursive=True)]
    for process in tree:
        process.suspend()
    try:
        failed = subprocess.run(
            command("adapt", "registry", file), cwd=ROOT, timeout=400, capture_output=True, text=True
        )
    finally:
        for process in tree:
            process.resume()
    assert failed.returncode == 7
    assert "does not answer" in failed.stderr
    assert "Traceback" not in failed.stderr
    began = time.monotonic()
    assert subprocess.run(command("adapt", "registry", file), cwd=ROOT, timeout=300).returncode == 0
    # It goes on from the exported directory: no second training.
    assert time.monotonic() - began < 60
    assert_whole(params, "registry")


def test_mlflow_and_prefect_may_die_in_the_middle_of_an_adapt(people: Operated, quickstart: str) -> None:
    """Their process reaper and supervisor start them again; the run goes on and registers its version."""
    before = len(people.mlflow.search_model_versions(f"name = '{POLICY}'"))
    run = people.start("adapt", policy=POLICY, steps=8, seed=11, scored=False).json()["id"]
    assert people.wait(run, "Running")["name"] == "Running"
    pids = {service.name: service.pid for service in services.status(load_params(people.settings))}
    for name in ("mlflow", "prefect"):
        os.kill(int(pids[name] or 0), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while True:
        try:
            state = people.wait(run)
            break
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "Prefect did not come back."
            time.sleep(0.5)
    assert state["type"] == "COMPLETED", state["message"]
    assert len(people.mlflow.search_model_versions(f"name = '{POLICY}'")) == before + 1


def test_several_policies_are_adapted_at_once_by_one_command(params: Params, file: Path) -> None:
    names = ("both-0", "both-1")
    assert subprocess.run(command("adapt", *names, file), cwd=ROOT, timeout=300).returncode == 0
    for name in names:
        assert_whole(params, name)
