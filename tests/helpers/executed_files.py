"""Count the files of engine/ and kernels/ of which a function runs in one operation of the live services.

    python -m tests.helpers.executed_files BASE [--only requests|step|release] [--list]

BASE is the directory of a built base. The operations are a warm and a cold chat request (API server and
engine core), by a key with limits and budgets, a training step (trainer and the loop, which runs in this
process), and a release (controller, and its client in this process). What runs at an import does not count,
and in a request and a step neither what clocks run, such as a heartbeat. `--list` prints the files.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from engine.base.families import BaseShapes
from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.errors import NotFound
from engine.ledger.ledger import Spool
from engine.security.credentials import credential
from engine.settings.params import Params, load_params, resolve_policy
from engine.training.loop import train
from tests.helpers.live import RunningEngine, free_port, start_engine, stop_engine, stop_group
from tests.helpers.parity import random_adapter
from tests.helpers.rows import NEW, OLD, THIRD, fill

HERE = Path(__file__).parent
# Each asks a new adapter, for which there is a free slot. What runs in some of them only is periodic work.
COLD_REQUESTS = WARM_REQUESTS = 8
LIMITS = {"tokens_per_day": 1e12, "tokens_per_minute": 1e12, "requests_per_minute": 1e9, "concurrency": 1e6}
# Longer than the slowest clock of gateway, trainer and loop pauses, `HEARTBEAT_S` of
# engine.training.service.client.
IDLE_S = 10.0
# A route's version that is later than the start of any canary here.
LATER = 1 << 20


def watch(file: Path) -> None:
    """Have this process, and those that it starts from now on, note what they run while `file` exists."""
    os.environ["EXECUTED_FILES"] = str(file)


def end(file: Path) -> set[str]:
    """Return the files that ran in the window that ends here."""
    return {path for path, _ in calls(file)}


def calls(file: Path) -> Counter[tuple[str, str]]:
    """Return how often each file ran in the window that ends here, by way of which functions."""
    found = Counter((path, by) for path, by in (line.split("\t") for line in file.read_text().splitlines()))
    file.unlink()
    return found


def requests(engine: RunningEngine, file: Path) -> tuple[set[str], set[str]]:
    """Return what runs in a warm chat request and in a cold one."""
    shapes = BaseShapes.read(engine.base_path).modules()
    key = engine.catalog.keys.create("tenant", ("infer", "pin"), limits=LIMITS)
    cold, warm = [], []
    with engine.client() as client:
        # Its connection stays open.
        client.headers["authorization"] = f"Bearer {key}"
        file.touch()
        time.sleep(IDLE_S)
        clocks = set(calls(file))
        for seed in range(COLD_REQUESTS):
            name = engine.publish("cold", random_adapter(shapes, seed), 8)
            # The gateway looks every 0.25 s whether the catalog has changed.
            time.sleep(1)
            cold.append(asked(client, name, file, clocks))
        for _ in range(WARM_REQUESTS):
            time.sleep(0.3)
            warm.append(asked(client, name, file, clocks))
    return set.intersection(*warm), set.intersection(*cold)


def asked(client: httpx.Client, name: str, file: Path, clocks: set[tuple[str, str]]) -> set[str]:
    """Return what runs from a chat request until its end is written, but for calls that `clocks` make."""
    file.touch()
    messages = [{"role": "user", "content": "1 + 2 ="}]
    body = {"model": name, "messages": messages, "max_tokens": 8}
    client.post("/v1/chat/completions", json=body).raise_for_status()
    time.sleep(0.1)
    return {path for path, by in calls(file) if (path, by) not in clocks}


def with_service(
    module: str, state: Path, settings: dict[str, Any], use: Callable[[Params], Any], before: str = ""
) -> Any:
    """Run a service with these settings, after the statements `before`, while `use` is called."""
    path = state / f"{module}.json"
    path.write_text(json.dumps(settings))
    with (state / f"{module}.log").open("wb") as log:
        started = f"{before}\nimport runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        command = [sys.executable, "-c", started, "--params", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        return use(load_params(path))
    finally:
        stop_group(process)


def training_step(engine: RunningEngine, file: Path) -> set[str]:
    """Train four steps and return what runs in each of the last three, from row to row.

    Before each of them nothing is asked of the services for longer than a step takes and than the slowest
    clock, a heartbeat, pauses. What runs then runs without a step. A function does not count in the step
    where it is called by way of the same functions, and not more often than then: a clock called it. So a
    file that clocks and the step use, such as a client's or a server's, counts.
    """
    found: list[set[str]] = []
    clocks = Counter[tuple[str, str]]()

    def on_step(row: Mapping[str, Any]) -> None:
        nonlocal clocks
        if row["step"] > 1:
            found.append({path for path, _ in calls(file) - clocks})
        file.touch()
        time.sleep(IDLE_S)
        clocks = calls(file)
        file.touch()

    def use(params: Params) -> None:
        # The client reads it before the service may have made it.
        credential(params.paths, "trainer")
        train(params, "sums", resolve_policy(params, "sums").config, engine.key, on_step)

    given = json.loads((engine.state / "params.json").read_text())
    policies = {"sums": {"task": "addition", "suite": "addition-terse", "rank": 8, "steps": 4}}
    settings = given | {"trainer": {"port": free_port()}, "policies": policies}
    with_service("engine.training.service.app", engine.state, settings, use)
    return set.intersection(*found)


def release(state: Path, file: Path) -> set[str]:
    """Release two revisions, one after the other, with scores and users that speak for them."""

    def use(params: Params) -> set[str]:
        url = params.url("controller")
        own = credential(params.paths, "controller")
        with ControllerClient(url, own) as client, contextlib.suppress(NotFound):
            # Comes back once the controller is up.
            client.running_release("sorting")
        with ControllerClient(url, params.paths.local_key.read_text().strip()) as client:
            return one(client, NEW, OLD) & one(client, THIRD, NEW)

    def one(client: ControllerClient, canary: str, champion: str) -> set[str]:
        file.touch()
        row = client.start_release("sorting", canary)
        client.wait_for(row["id"], 60, "canary", lambda release: release["step"] == "canary")
        for number in range(300):
            arm = (
                {"digest": champion, "arm": "champion"} if number % 5 else {"digest": canary, "arm": "canary"}
            )
            id = f"{canary[:2]}-{number}"
            arm |= {"policy": "sorting", "key": "k", "purpose": "user", "route_version": LATER}
            spool.emit("observations", id=id, unit=id, **arm)
            spool.emit("feedback", request_id=id, reward=1.0, key="k")
        spool.rotate()
        assert client.wait_for_verdict(row["id"], 60)["state"] == "promoted"
        # The thread that mirrors a route to MLflow has its turn.
        time.sleep(1.2)
        return end(file)

    settings = {
        "state_dir": str(state),
        "release": {"min_units": 10},
        "controller": {"port": free_port()},
    }
    paths = Params(state_dir=state).paths
    migrate(paths.catalog_url)
    fill(whole_catalog(paths.catalog_url))
    spool = Spool(paths.spool, "gateway")
    scores = {"policy": "sorting", "base": "base", "suite": "sorting-json", "suite_version": "1"}
    for digest in (OLD, NEW, THIRD):
        spool.emit("scores", digest=digest, item="a", score=1.0, **scores)
    spool.rotate()
    # So that the lease is not renewed in the window.
    before = "import engine.controller.route_changes as changes; changes.LEASE_S = 300"
    return with_service("engine.controller", state, settings, use, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", choices=("requests", "step", "release"))
    arguments = parser.parse_args()
    wanted = {arguments.only} if arguments.only else {"requests", "step", "release"}

    def tell(name: str, files: set[str]) -> None:
        print(f"{name}: {len(files)} files")
        if arguments.list:
            print("".join(f"  {path}\n" for path in sorted(files)), end="", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if wanted & {"requests", "step"}:
            watch(root / "engine.ran")
            engine = start_engine(arguments.base.resolve(), root / "engine", wait_s=600, slots=COLD_REQUESTS)
            try:
                if "requests" in wanted:
                    warm, cold = requests(engine, root / "engine.ran")
                    tell("warm request", warm)
                    tell("cold request", cold)
                if "step" in wanted:
                    watch(root / "trainer.ran")
                    tell("training step", training_step(engine, root / "trainer.ran"))
            finally:
                stop_engine(engine)
        if "release" in wanted:
            watch(root / "controller.ran")
            tell("release", release(root / "controller", root / "controller.ran"))


if __name__ == "__main__":
    if "EXECUTED_FILES" not in os.environ:
        # What is watched must be so from its interpreter's start; this process too.
        path = os.pathsep.join((str(HERE / "executed"), str(HERE.parents[1])))
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**os.environ, "EXECUTED_FILES": "", "PYTHONPATH": path},
        )
    main()
