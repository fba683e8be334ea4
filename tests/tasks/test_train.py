"""The task that trains hands the parts to the run that a main room does not know."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.training.several_engines import Engines
from tasks import steps


def test_a_run_may_sample_from_several_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Mock(name="train")
    monkeypatch.setattr("engine.training.loop.train", trained)
    monkeypatch.setattr("tasks.tracking.Tracking", lambda url, policy: nullcontext(Mock()))
    params, config = Params(state_dir=tmp_path), PolicyConfig(task="addition", suite="s")
    assert steps.train.fn(params, "sums", config, "key", Mock()) is trained.return_value
    assert trained.call_args.args[-1] == Engines.of


def test_one_machine_has_one_engine(tmp_path: Path) -> None:
    assert Engines.of(Params(state_dir=tmp_path), "ba" * 32) is None
