"""The trainer in a process of its own, and data for it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import torch

from engine.process_reaper import die_with_parent
from engine.security.credentials import credential
from engine.settings.params import Params
from engine.training.service.client import TrainerClient
from engine.training.service.protocol import AdamParams, Datum, EncodedText, ModelInput, TensorData
from tests.helpers.live import eventually

ADAM = AdamParams(learning_rate=1e-2)

SETTINGS = {
    "rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"], "seed": 3, "policy_config": {"suite": "x"},
}  # fmt: skip


class Service:
    """The trainer in a process of its own."""

    def __init__(self, params: Params, file: Path):
        self.params, self.file = params, file
        self.process: subprocess.Popen[bytes] | None = None
        self.client = TrainerClient(params.url("trainer"), credential(params.paths, "trainer"), patience_s=60)

    def start(self) -> None:
        """Start it, and wait until it answers or has ended."""
        command = [sys.executable, "-m", "engine.training.service.app", "--params", str(self.file)]
        with (self.file.parent / "trainer.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=partial(die_with_parent, os.getpid())
            )
        eventually(self.has_started_or_ended, 600)

    def has_started_or_ended(self) -> bool:
        assert self.process
        with suppress(httpx.TransportError):
            httpx.get(f"{self.client.url}/status", timeout=5)
            return True
        return self.process.poll() is not None

    def kill(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        assert self.process
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


def data(seed: int) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(5, 300, (4, 8), generator=generator).tolist()

    def datum(tokens: list[int], advantage: float) -> Datum:
        inputs = {
            "target_tokens": TensorData(data=[float(t) for t in tokens[1:]], dtype="int64"),
            "weights": TensorData(data=[0.0] * 3 + [1.0] * 4),
            "logprobs": TensorData(data=[0.0] * 3 + [-2.0] * 4),
            "advantages": TensorData(data=[0.0] * 3 + [advantage] * 4),
        }
        return Datum(model_input=ModelInput(chunks=[EncodedText(tokens=tokens[:-1])]), loss_fn_inputs=inputs)

    return [datum(row, index - 1.5) for index, row in enumerate(rows)]


def step(client: TrainerClient, session, number: int) -> dict:
    client.forward_backward(session, data(number))
    return client.optim_step(session, ADAM, position=number)
