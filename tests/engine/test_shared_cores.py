"""Engine and trainer share the cores: all for whoever computes alone, and the same bits either way."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.base.toys.recipes import RECIPES
from engine.planning.host import WIDE, takes_all_cores
from engine.serving import server
from engine.settings.params import Params
from engine.shared_cores import SharedCores

HOLD = """
import sys, time
from pathlib import Path
from engine.shared_cores import SharedCores
with SharedCores(Path(sys.argv[1]), "trainer", 1).computing():
    print("computing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_cores")
def test_who_computes_alone_takes_every_core(tmp_path: Path):
    engine, trainer = SharedCores(tmp_path, "engine", 3), SharedCores(tmp_path, "trainer", 2)
    with engine.computing():
        assert torch.get_num_threads() == 4
        with trainer.computing():
            assert torch.get_num_threads() == 2
            # The engine notices before its next step.
            engine.divide()
            assert torch.get_num_threads() == 3
        engine.divide()
        assert torch.get_num_threads() == 4
    with trainer.computing():
        assert torch.get_num_threads() == 4


@pytest.mark.long
@pytest.mark.usefixtures("four_cores")
def test_an_error_or_a_kill_gives_the_cores_back(tmp_path: Path):
    engine, trainer = SharedCores(tmp_path, "engine", 3), SharedCores(tmp_path, "trainer", 2)
    with pytest.raises(ValueError, match="in a step"), trainer.computing():
        raise ValueError("in a step")
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "computing\n"
        with engine.computing():
            assert torch.get_num_threads() == 3
        other.send_signal(signal.SIGKILL)
    with engine.computing():
        assert torch.get_num_threads() == 4


def test_threads_that_are_set_and_narrow_bases_keep_their_threads(tmp_path: Path):
    wide, narrow = {"hidden_size": WIDE}, RECIPES["tiny-dense"].config()
    params = Params.model_validate({"state_dir": tmp_path})
    assert takes_all_cores(wide, params)
    assert not takes_all_cores(narrow, params)
    for given in (
        {"engine": {"threads": 1}},
        {"trainer": {"threads": 1}},
        {"engine": {"tensor_parallel": 2}},
    ):
        assert not takes_all_cores(wide, Params.model_validate({"state_dir": tmp_path, **given}))
    (tmp_path / "config.json").write_text(f'{{"hidden_size": {WIDE}}}')
    share = max(1, len(os.sched_getaffinity(0)) - 1)
    wanted = {"folder": str(params.paths.cores), "share": share}
    assert server.core_settings(params, tmp_path, None) == wanted


@pytest.mark.parametrize("rows", [1, 4, 37, 700])
def test_bits_do_not_depend_on_the_threads(rows: int):
    """Products of SmolLM2-135M's widths, row by row and as gradients of their inputs."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(rows)
    for inputs, outputs in ((576, 576), (576, 1536), (1536, 576)):
        x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y = torch.nn.functional.linear(x, weight)
            found.append((y, y @ weight, y.log_softmax(-1), torch.nn.functional.rms_norm(y, (outputs,))))
        torch.set_num_threads(before)
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
