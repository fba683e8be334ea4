"""A trainer of several ranks in processes of their own, and the same training on any trainer."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from starlette.testclient import TestClient

from engine.process_reaper import die_with_parent
from engine.settings.params import Params
from engine.training.service import state
from engine.training.service.app import load_trainer, make_app
from engine.training.service.client import TrainerClient
from engine.training.service.protocol import Datum, EncodedText, ModelInput, SessionInfo, TensorData
from engine.training.service.session import state_file
from engine.training.service.trainer import Trainer
from tests.helpers.live import free_port
from tests.helpers.trainer_service import ADAM, SETTINGS, Service

APP: tuple[str, ...] = ("-m", "engine.training.service.app", "--params")
# Gloo's connections stay on this machine too.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
# Rows of a microbatch in these tests: a budget of 64 tokens, and rows of 8 tokens, of which 7 are computed.
ROWS = 9


def variables(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment, or none where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.environ()
    return {}


class RankedService(Service):
    """A trainer of `count` ranks: started by torchrun, or without it by the variables that it sets."""

    def __init__(self, params: Params, file: Path, count: int = 2, torchrun: bool = False):
        super().__init__(params, file)
        # Two processes import what one does.
        self.client.patience_s = 600
        self.count, self.torchrun = count, torchrun
        self.app = APP
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        port, app = str(free_port()), [*self.app, str(self.file)]
        if self.torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            counts = ["--nproc-per-node", str(self.count), "--max-restarts", "2"]
            self.processes = [self._spawn([*launcher, *counts, *app], LOOPBACK)]
            return
        world = {**LOOPBACK, "MASTER_PORT": port, "WORLD_SIZE": str(self.count), "LOCAL_WORLD_SIZE": "2"}
        for rank in range(self.count):
            self.processes.append(self._spawn(app, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def _spawn(self, arguments: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.file.parent / "ranks.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank that torchrun has started."""
        (launcher,) = self.processes
        ranks = psutil.Process(launcher.pid).children()
        return next(one for one in ranks if variables(one).get("RANK") == str(number))

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self.client.close()


class AloneTrainer:
    """A trainer of one process, which is this one, spoken to over HTTP."""

    def __init__(self, params: Params):
        self.trainer: Trainer = load_trainer(params)
        self.client = TrainerClient("http://trainer", patience_s=1)
        self.client.http = TestClient(make_app(self.trainer), base_url="http://trainer")

    def stop(self) -> None:
        self.client.close()
        self.trainer.close()
        self.trainer.exporter.catalog.close()


def batch(seed: int, microbatches: float = 3) -> list[Datum]:
    """Return rows that fill this many microbatches; of the second one no token teaches."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(5, 300, (int(microbatches * ROWS), 8), generator=generator).tolist()

    def datum(number: int, tokens: list[int]) -> Datum:
        teaches = (number % 4 - 1.5) * (number // ROWS != 1)
        inputs = {
            "target_tokens": TensorData(data=[float(t) for t in tokens[1:]], dtype="int64"),
            "weights": TensorData(data=[0.0] * 3 + [1.0] * 4),
            "logprobs": TensorData(data=[0.0] * 3 + [-2.0] * 4),
            "advantages": TensorData(data=[0.0] * 3 + [teaches] * 4),
        }
        return Datum(model_input=ModelInput(chunks=[EncodedText(tokens=tokens[:-1])]), loss_fn_inputs=inputs)

    return [datum(number, row) for number, row in enumerate(rows)]


def opened(client: TrainerClient, name: str, **changes: Any) -> SessionInfo:
    """Open a session of the policy of the same name."""
    return client.create_session(name, name, holder="a", **{**SETTINGS, **changes})


def one_step(client: TrainerClient, session: SessionInfo, number: int, **loss: Any) -> dict[str, Any]:
    """Take a step in two calls; return everything that a caller sees of it but the process's memory."""
    seen: dict[str, Any] = {}
    for half, microbatches in enumerate((2.5, 1)):
        found = client.forward_backward(session, batch(10 * number + half, microbatches), **loss)
        found["metrics"].pop("peak_memory")
        seen[f"call {half}"] = found
    seen["forward"] = client.forward(session, batch(99, 1.5))
    return seen | client.optim_step(session, ADAM, position=number)


def stored(params: Params, session: str) -> dict[str, torch.Tensor]:
    """Return a stored session's factors and Adam moments, by name."""
    held = state.read(state_file(params.paths.sessions / session))["adapter"]
    moments = {
        f"{number} {name}": value
        for number, one in held["optimizer"]["state"].items()
        for name, value in one.items()
    }
    return {**held["factors"], **moments}
