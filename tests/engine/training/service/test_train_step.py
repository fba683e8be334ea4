"""A step's row, as the loop makes it, arrives whole in every place: trainer, ledger, MLflow, terminal."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from engine.errors import Conflict
from engine.ledger.ledger import Ledger, Spool
from engine.settings.losses import LossConfig
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.training import loop, rollout_data
from engine.training.line_of_training import Line
from engine.training.loop import grpo_step, open_session
from engine.training.rollout_data import Drawn, Sampler
from engine.training.run import FOR_RESTARTS, Run
from engine.training.sample_groups import Sample
from engine.training.service.app import load_trainer, make_app
from engine.training.service.client import TrainerClient
from engine.training.service.protocol import SessionInfo
from engine.training.service.train_step import TrainStep
from flows.display import step_note
from tasks.register import numbers
from tests.helpers.history import step_row

CONFIG = PolicyConfig(
    task="addition",
    suite="s",
    verifier="exact",
    groups=2,
    group_size=2,
    steps=2,
    loss_config={"kl": 0.01},
)
REWARDS = [1.0, 0.0, 0.25, 0.25]
BY_REASON = {"masked", "verifier_faults"}
# Of one's own: it learns from every answer, whatever the group's rewards.
IMITATION = """
def imitation(tokens, settings):
    return -tokens.new_T
"""


class Draws:
    """Hands out the same two groups for each step, as if the base had drawn them."""

    def begin(self, step: int, position: int, sampler: Sampler) -> None:
        pass

    def take(self, step: int) -> Drawn:
        whole, cut = Sample((7, 8, 9), (-2.0, -3.0, -1.0), "7"), Sample((7, 8), (-2.0, -3.0), "8", True)
        groups = [[whole, cut], [whole, cut]]
        return Drawn(Sampler(0, None), ["?", "?"], [[5, 6], [6, 5]], groups, position=step + 1, seconds=0.25)


class Judge:
    """Gives the rewards above, whatever was answered."""

    def __init__(self, rewards: Sequence[float | None] = REWARDS * 2) -> None:
        self.left = iter(rewards)

    def judge(self, answers: Any, whole: bool = False) -> Any:
        scores = [next(self.left) for _ in answers]
        return SimpleNamespace(scores=scores, errors=+Counter({"raised KeyError": scores.count(None)}))


@pytest.fixture
def run(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the loop needs: a trainer of its own without a port, and drawn samples without an engine."""
    monkeypatch.setattr(rollout_data, "REFILLS", 0)
    params = Params(
        state_dir=tmp_path,
        base={"name": str(tiny_base)},
        policies={"sums": CONFIG},
        python_modules=("step_losses",),
    )
    trainer = load_trainer(params)
    client = TrainerClient.of(params)
    client.close()
    client.http = TestClient(make_app(trainer))
    line = Line("sums-1", None, 3, ("q_proj", "down_proj"))
    spool = Spool(params.paths.spool, "train-sums")
    yield Run(
        params,
        "sums",
        CONFIG,
        line,
        SimpleNamespace(replays=False, config=CONFIG),
        Draws(),
        client,
        spool,
        Judge(),
    )
    client.close()
    trainer.close()


def opened(run: Run) -> SessionInfo:
    return run.client.create_session(
        "sums-1", "sums", holder="me", rank=4, alpha=8.0, targets=["q_proj", "down_proj"], seed=3,
        policy_config=CONFIG.model_dump(mode="json"),
    )  # fmt: skip


def test_of_two_runs_in_one_process_one_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TAKE_OVER_S", 0.0)
    shared = {item.name: getattr(run, item.name) for item in fields(run) if item.name != "holder"}
    first, second = Run(**shared), Run(**shared)
    opened = open_session(first)
    with pytest.raises(Conflict, match=r"'sums'.*written"):
        open_session(second)
    # The first one may open it again, as it does where a step broke off.
    assert open_session(first).fence > opened.fence
    # What a run does at its end, however it ends.
    first.client.release()
    assert open_session(second).step == 0
    with pytest.raises(Conflict, match=r"'sums'.*written"):
        open_session(first)


@pytest.mark.parametrize(
    ("loss", "rewards", "learns"),
    [
        ("dapo", [1.0, 0.0, 0.25, 0.25], True),
        ("dapo", [0.5] * 4, False),
        ("grpo", [0.5] * 4, False),
        # A loss of one's own says itself what teaches, but not of answers that nobody could judge.
        ("python:step_losses:imitation", [0.5] * 4, True),
        ("python:step_losses:imitation", [None] * 4, False),
    ],
)
def test_a_step_is_taken_where_the_loss_has_a_gradient(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, rewards: list[Any], learns: bool
) -> None:
    (tmp_path / "step_losses.py").write_text(IMITATION)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = CONFIG.model_copy(update={"loss": loss, "loss_config": LossConfig()})
    session = grpo_step(replace(run, config=config, verifier=Judge(rewards)), opened(run))
    assert (session.history[-1]["grad_norm"] > 0) is learns


def test_every_metric_of_the_loops_steps_is_in_every_place(run: Run) -> None:
    session = opened(run)
    run.client.backpressure_s["sums-1"] = 0.75
    for _ in range(2):
        session = grpo_step(run, session)
    rows = [
        {name: value for name, value in row.items() if name not in FOR_RESTARTS} for row in session.history
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["backpressure_s"] for row in rows] == [0.75, 0.0]
    assert set(step_row(1)) == set(rows[0])
    # The first step was drawn by the base, which has no experts.
    unknown = {"digest", "out_of_route", "collapse", "held_out_loss"}
    assert all({name for name, value in row.items() if value is None} == unknown for row in rows)
    assert (rows[0]["reward"], rows[0]["reward_std"], rows[0]["zero_spread"]) == (
        0.375,
        pytest.approx(0.375),
        0.5,
    )
    assert (rows[0]["length_mean"], rows[0]["length_max"], rows[0]["truncated"]) == (2.5, 3, 0.5)

    run.spool.close()
    ledger = Ledger(run.params.paths.ledger)
    assert ledger.ingest(run.params.paths.spool) == 2
    assert not (run.params.paths.spool / "rejected").exists()
    found = ledger.connection.execute("FROM train_steps ORDER BY step")
    names = [column[0] for column in found.description]
    stored = [dict(zip(names, values, strict=True)) for values in found.fetchall()]
    for row, kept in zip(rows, stored, strict=True):
        assert TrainStep.of(kept) == TrainStep.of(row)
        assert {name: json.loads(kept[name]) if name in BY_REASON else kept[name] for name in row} == row
    ledger.close()

    drawn = numbers(rows[0])
    assert drawn["reward"] == 0.375
    assert set(rows[0]) - set(drawn) == {"policy", "session", "loss_fn", *BY_REASON, "step", *unknown}
    shown = run.client.http.get("/metrics").text
    assert f'graftwork_policy_entropy{{policy="sums"}} {rows[1]["entropy"]}' in shown
    assert "graftwork_trainer_steps_total 2.0" in shown
    assert step_note(rows[0]).startswith("reward 0.38  ratio ")


def test_a_row_of_any_version_and_place_is_a_step() -> None:
    assert asdict(TrainStep.of(step_row(1))) == step_row(1)
    # Of before most metrics, as the ledger returns it; and as a session keeps it.
    stored = {"id": "sums-1-3", "at": 1.0, "policy": "sums", "step": 3, "reward": None}
    stored |= {"masked": '{"outlier": 2}', "verifier_faults": None}
    assert TrainStep.of(stored) == TrainStep(policy="sums", step=3, masked={"outlier": 2})
    assert TrainStep.of({"step": 3, "reward": 0.5, "handed": "b" * 64}) == TrainStep(step=3, reward=0.5)
