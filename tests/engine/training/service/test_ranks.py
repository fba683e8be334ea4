"""A trainer of several ranks: the bits of one, a part of the base each, and what ends a rank."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.errors import Cancelled, ConfigError, ServiceError
from engine.settings.params import load_params
from engine.threads import background
from engine.training.service.client import TrainerClient
from tests.helpers.live import free_port
from tests.helpers.moe_bases import qwen3_moe
from tests.helpers.rank_processes import (
    APP,
    LOOPBACK,
    AloneTrainer,
    RankedService,
    batch,
    one_step,
    opened,
    stored,
)

# Rank 0 alone calls it: that it counts its calls would show any other.
OWN = """
calls = []

def loss(tokens, settings):
    calls.append(len(tokens.new_T))
    if "leaves" in settings and len(calls) % 2 == 0:
        raise SystemExit
    return -tokens.new_T * (1 + len(calls) / 8)
"""

pytestmark = pytest.mark.services


def settings(base: Path, state: Path, **trainer: Any) -> Path:
    """Write settings under which a microbatch has nine of the rows of `batch`."""
    state.mkdir()
    file = state / "params.json"
    own = {"port": free_port(), "microbatch_tokens": 64, "threads": 1, **trainer}
    given = {"state_dir": str(state), "base": {"name": str(base)}, "trainer": own, "python_modules": ["own"]}
    file.write_text(json.dumps(given))
    return file


@contextmanager
def both(base: Path, directory: Path) -> Iterator[tuple[RankedService, AloneTrainer]]:
    """A trainer of two ranks, and one of this process."""
    two = settings(base, directory / "two")
    service = RankedService(load_params(two), two)
    service.start()
    alone = AloneTrainer(load_params(settings(base, directory / "one")))
    try:
        yield service, alone
    finally:
        alone.stop()
        service.stop()


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path[1:]]))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return "python:own:loss"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, ServiceError)) as refused:
        call()
    return str(refused.value)


def trained(client: TrainerClient, own: str, steps: int, lowest: str) -> list[Any]:
    """Train two policies in turns with several losses, past calls that are refused; return what was seen.

    `lowest` is the lowest projection of one policy.
    """
    left = opened(client, "left")
    right = opened(client, "right", rank=2, targets=["layers.2.self_attn.v_proj", lowest])
    seen: list[Any] = []
    for number in range(steps):
        seen.append(one_step(client, left, number, loss="dapo", config={"kl": 0.1}))
        # Sample 20 is in the third microbatch, after two that were computed.
        broken = batch(7)
        broken[20].loss_fn_inputs["logprobs"].data[5] = -1e30
        seen.append(refusal(lambda: client.forward_backward(right, broken)))  # noqa: B023
        leaves = {"options": {"leaves": True}}
        seen.append(refusal(lambda: client.forward_backward(right, batch(8), own, leaves)))  # noqa: B023
        seen.append(one_step(client, right, number, loss=own))
    exported = client.export(left, "revision", probe_prompts=[[5, 6, 7], [9, 8, 7, 6], [11]], probe_tokens=6)
    assert exported.directory
    probe = json.loads((exported.directory / "probe.json").read_text())
    return [*seen, exported.digest, probe]


def test_two_ranks_give_one_ranks_bits(tiny_base: Path, tmp_path: Path, own_loss: str) -> None:
    with both(tiny_base, tmp_path) as (two, one):
        refuse_difference(two, one, own_loss, 2, "layers.1.mlp.up_proj")


@pytest.mark.slow
def test_two_ranks_train_a_mixture_of_experts(tiny_base: Path, tmp_path: Path, own_loss: str) -> None:
    base = qwen3_moe(tmp_path / "moe", tiny_base)
    with both(base, tmp_path) as (two, one):
        refuse_difference(two, one, own_loss, 3, "layers.1.mlp.experts.up_proj")


def refuse_difference(two: RankedService, one: AloneTrainer, own: str, steps: int, lowest: str) -> None:
    """Train on both; the bits must be equal, and each rank must hold about half of the parameters."""
    want = trained(one.client, own, steps, lowest)
    assert trained(two.client, own, steps, lowest) == want
    for session in ("left", "right"):
        have, wanted = stored(two.params, session), stored(one.trainer.params, session)
        assert have.keys() == wanted.keys()
        assert [name for name in have if not torch.equal(have[name], wanted[name])] == []
    (whole,) = one.client.health()["parameter_bytes"]
    parts = two.client.health()["parameter_bytes"]
    assert sum(parts) == whole
    assert max(parts) <= 0.55 * whole


@pytest.mark.slow
def test_a_step_is_resumed_after_a_rank_is_killed(tiny_base: Path, tmp_path: Path) -> None:
    file = settings(tiny_base, tmp_path / "two")
    service = RankedService(load_params(file), file, torchrun=True)
    service.start()
    alone = AloneTrainer(load_params(settings(tiny_base, tmp_path / "one")))
    try:
        want = opened(alone.client, "cut")
        for number in range(4):
            one_step(alone.client, want, number)
        cut = opened(service.client, "cut")
        one_step(service.client, cut, 0)
        for number, victim in ((1, 1), (2, 0)):
            # Long enough that the kill falls into its rounds.
            running = threading.Thread(target=ignored, args=(service.client, cut, batch(5, 200)))
            running.start()
            time.sleep(0.5)
            service.rank(victim).kill()
            running.join(120)
            assert not running.is_alive()
            cut = opened(service.client, "cut")
            assert cut.step == number
            one_step(service.client, cut, number)
        one_step(service.client, cut, 3)
        have, wanted = stored(service.params, "cut"), stored(alone.trainer.params, "cut")
        assert [name for name in wanted if not torch.equal(have[name], wanted[name])] == []
        ranks = [service.rank(number) for number in range(2)]
        (launcher,) = service.processes
        os.kill(launcher.pid, signal.SIGKILL)
        assert psutil.wait_procs(ranks, timeout=20)[1] == []
    finally:
        alone.stop()
        service.stop()


def ignored(client: TrainerClient, session: Any, data: Any) -> None:
    with suppress(ServiceError, ConfigError):
        client.forward_backward(session, data)


def place_of(client: TrainerClient, operation: str) -> int | None:
    """Return an operation's place in the queue, 0 while it runs; None before the trainer has it."""
    answer = client.http.get(f"/operations/{operation}")
    return None if answer.status_code == 404 else int(answer.json()["queue"]["position"])


@pytest.mark.slow
def test_a_cancelled_call_leaves_the_ranks_in_step(tiny_base: Path, tmp_path: Path) -> None:
    with both(tiny_base, tmp_path) as (two, one):
        session, wanted = opened(two.client, "cut"), opened(one.client, "cut")
        data = batch(5, 200)
        running = background(lambda: two.client.forward_backward(session, data, request_id="long"))
        until = time.monotonic() + 60
        while place_of(two.client, "long") != 0:
            assert time.monotonic() < until
        two.client.cancel("long")
        assert isinstance(running.exception(60), Cancelled)
        assert one_step(two.client, session, 0) == one_step(one.client, wanted, 0)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_within_the_limit(tiny_base: Path, tmp_path: Path) -> None:
    file = settings(tiny_base, tmp_path / "two")
    service = RankedService(load_params(file), file)
    limited = "from engine.training.service import app; app.OPERATION_S = 20; app.main()"
    service.app = ("-c", limited, "--params")
    service.start()
    try:
        session = opened(service.client, "cut")
        service.client.patience_s = 1
        service.processes[1].send_signal(signal.SIGSTOP)
        ignored(service.client, session, batch(1))
        assert service.processes[0].wait(40) == 1
        service.processes[1].send_signal(signal.SIGCONT)
        assert service.processes[1].wait(20) == 1
    finally:
        service.stop()


def test_a_launcher_without_an_address_is_refused(tmp_path: Path) -> None:
    file = settings(Path("tiny-dense"), tmp_path / "two")
    told = subprocess.run(
        [sys.executable, *APP, str(file)],
        env={**os.environ, **LOOPBACK, "WORLD_SIZE": "2", "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert told.returncode == ConfigError.exit_code
    assert "not MASTER_PORT" in told.stderr
