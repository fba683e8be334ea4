"""Steps without a gradient: they cost little and end the training with a reason; DAPO's refill; a trial."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tenacity import wait_none

from engine.clients.engine import EngineClient
from engine.errors import ConfigError, NotFound
from engine.problems.procedural import Problem
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.training import loop, rollout_data, run_health
from engine.training.line_of_training import Line
from engine.training.loop import Trained, train
from engine.training.reward_signal import Trial
from engine.training.rollout_data import Drawn, Judged, Sampler, Source, draw, judge, refill
from engine.training.run import Run
from engine.training.sample_groups import Sample, Sampling
from engine.training.service.protocol import Datum, Exported, SessionInfo
from tasks import tryout
from tests.helpers.command_line import graftwork
from tests.helpers.live import free_port
from tests.helpers.taken_step import take_step

CONFIG = PolicyConfig(task="addition", suite="s", groups=4, group_size=2, steps=6)
FLAT, SPREAD = (0.0, 0.0), (1.0, 0.0)


@pytest.fixture(params=[0], autouse=True)
def refills(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many batches replace groups without spread: none, unless a test says."""
    monkeypatch.setattr(rollout_data, "REFILLS", request.param)
    return int(request.param)


class Tokenizer:
    """A token for each character."""

    chat_template, bos_token, bos_token_id = None, "", None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]


class Judge:
    """Gives each group the next rewards, whatever was answered; None fails."""

    def __init__(self, *rewards: Sequence[float] | None, otherwise: Sequence[float] | None = None) -> None:
        self.left, self.otherwise = iter(rewards), otherwise

    def judge(self, answers: Any, whole: bool = False) -> Any:
        scores = next(self.left, self.otherwise)
        if scores is None:
            return SimpleNamespace(scores=[], errors=Counter({"raised KeyError": 1}))
        assert len(list(answers)) == len(scores)
        return SimpleNamespace(scores=list(scores), errors=Counter())

    def close(self) -> None:
        pass


class Client:
    """A trainer whose gradients are those of the advantages that it is sent."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.sent: list[list[Datum]] = []
        self.backpressure_s: dict[str, float] = {}
        # What the ledger was told, by table and id.
        self.told: dict[tuple[str, str], dict[str, Any]] = {}

    def create_session(self, session: str, policy: str, **_: Any) -> SessionInfo:
        return SessionInfo(session, policy, len(self.history), 0, 1, "base", None, tuple(self.history))

    def export(self, session: SessionInfo, kind: str = "snapshot", **_: Any) -> Exported:
        return Exported(f"{session.step:012d}{0:052d}", "x", Path("x"), 4, session.step, 1, 0.0)

    def forward_backward(self, session: SessionInfo, data: list[Datum], *_: Any, **__: Any) -> dict[str, Any]:
        self.sent.append(data)
        learned = sum(any(datum.loss_fn_inputs["advantages"].data) for datum in data)
        return {"metrics": {"tokens": len(data), "learned_tokens": learned, "importance_ratio": 1.0}}

    def optim_step(
        self, session: SessionInfo, adam: Any, *, position: int, record: dict[str, Any], skip: bool
    ) -> dict[str, Any]:
        done = {"step": session.step + 1, "grad_norm": 0.0 if skip else 1.0}
        self.history.append(record | done)
        return done

    def close_session(self, session: SessionInfo) -> None:
        pass

    def emit(self, table: str, *, id: str, **fields: Any) -> None:
        self.told[table, id] = fields

    release = close = lambda self: None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any], Sampling]]:
    """What the engine is asked for; each answer is its group's and sample's number."""
    asked: list[tuple[str, list[Any], Sampling]] = []

    def sampled(url: str, key: str, model: str, prompts: Any, sampling: Sampling) -> list[list[Sample]]:
        asked.append((model, prompts, sampling))
        return [
            [Sample((7, 1), (-1.0, -0.5), f"answer {p}.{g}") for g in range(sampling.group_size)]
            for p in range(len(prompts))
        ]

    monkeypatch.setattr(rollout_data, "sample_groups", sampled)
    return asked


def source(config: PolicyConfig) -> Source:
    line = Line("sums-1", None, 3, ("q_proj",))
    return Source("sums", config, line, Tokenizer(), "http://engine", "key", "tiny")


@pytest.fixture
def trained(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Judge, PolicyConfig], tuple[Trained, Client]]:
    """Train on a verifier's rewards."""

    def trained(verifier: Judge, config: PolicyConfig = CONFIG) -> tuple[Trained, Client]:
        params, drawn_from, client = (
            Params(policies={"sums": config}, state_dir=tmp_path),
            source(config),
            Client(),
        )
        spool: Any = SimpleNamespace(emit=client.emit, close=lambda: None)
        ahead = rollout_data.Ahead(drawn_from)
        parts: Any = (params, "sums", config, drawn_from.line, drawn_from, ahead, client, spool, verifier)
        monkeypatch.setattr(loop, "prepare", lambda *_: Run(*parts))
        return train(params, "sums", config, "key"), client

    return trained


# A step that teaches nothing


@pytest.mark.parametrize(
    ("loss", "kl", "sent"), [("dapo", 0, 2), ("grpo", 0, 2), ("grpo", 0.1, 6), ("dapo", 0.1, 6)]
)
def test_without_spread_one_group_is_enough_to_measure_the_ratio(loss: str, kl: float, sent: int) -> None:
    """Unless a KL term pulls without any spread. The first group is not sound."""
    sample = Sample((7, 1), (-1.0, -0.5), "x")
    drawn = Drawn(
        Sampler(0, None), [Problem("t", "q", "a")] * 4, [[5], [6], [7], [8]], [[sample] * 2] * 4, 9, 0.1
    )
    config = CONFIG.model_copy(
        update={"loss": loss, "loss_config": CONFIG.loss_config.model_copy(update={"kl": kl})}
    )
    judged = Judged([None, FLAT, (1.0, 1.0), FLAT], Counter())
    data, row = take_step(drawn, judged, config)
    assert (len(data), row["groups_kept"]) == (sent, 0)
    assert data[0].model_input.chunks[0].tokens[0] == 6
    data, row = take_step(drawn, replace(judged, rewards=[None, FLAT, SPREAD, FLAT]), config)
    assert (len(data), row["groups_kept"]) == (2 if loss == "dapo" else 6, 1)


def test_training_stops_after_steps_without_a_gradient(trained: Any) -> None:
    with pytest.raises(ConfigError) as stopped:
        trained(Judge(*[SPREAD] * 4, *[FLAT] * 12, otherwise=SPREAD))
    said = str(stopped.value)
    assert "step 4" in said
    assert "last 3 steps" in said
    assert "100% of their" in said
    assert "reward of 0.00" in said
    # Three answers, each beside what the verifier wanted.
    assert said.count("was answered with 'answer ") == said.count("expected '") == 3
    assert all(remedy in said for remedy in ("another verifier or contract", "grades", "more groups", "SFT"))
    assert "`graftwork policy try sums`" in said
    assert "steps to 4" in said


def test_a_step_that_teaches_begins_the_count_anew(trained: Any) -> None:
    flat = [FLAT] * 4
    done, client = trained(Judge(*flat, *flat, SPREAD, *[FLAT] * 3, *flat, *flat, otherwise=SPREAD))
    assert (done.step, len(client.sent)) == (6, 6)
    assert [len(data) for data in client.sent] == [2, 2, 2, 2, 2, 8]


def test_only_so_many_steps_in_a_row_end_it(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_health, "NO_SIGNAL_STEPS", 1)
    with pytest.raises(ConfigError, match=r"step 1.*last 1 steps"):
        trained(Judge(otherwise=FLAT))
    monkeypatch.setattr(run_health, "NO_SIGNAL_STEPS", 6)
    assert trained(Judge(*[FLAT] * 20, otherwise=SPREAD))


def test_a_policy_that_is_always_right_trains_to_its_end(trained: Any) -> None:
    done, _ = trained(Judge(otherwise=(1.0, 1.0)))
    assert done.step == CONFIG.steps


class Gapped(Client):
    """A trainer whose tokens all have a gradient, as far as it is from the sampler."""

    def forward_backward(self, session: SessionInfo, data: list[Datum], *_: Any, **__: Any) -> dict[str, Any]:
        found = super().forward_backward(session, data)
        return {"metrics": found["metrics"] | {"learned_tokens": len(data)}}


@pytest.mark.parametrize(("kl", "norm"), [(0.0, 0.0), (0.1, 1.0)])
def test_steps_without_spread_move_the_adapter_for_a_kl_term_alone(
    trained: Any, monkeypatch: pytest.MonkeyPatch, kl: float, norm: float
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Client", Gapped)
    config = CONFIG.model_copy(update={"loss_config": CONFIG.loss_config.model_copy(update={"kl": kl})})
    done, _ = trained(Judge(otherwise=(1.0, 1.0)), config)
    assert [row["grad_norm"] for row in done.curve] == [norm] * CONFIG.steps
    done, _ = trained(Judge(otherwise=SPREAD), config)
    assert [row["grad_norm"] for row in done.curve] == [1.0] * CONFIG.steps


def test_a_verifier_that_always_fails_is_named(trained: Any) -> None:
    with pytest.raises(ConfigError, match=r"No group.*12 answers"):
        trained(Judge(otherwise=None))


# Dynamic sampling


def filled(config: PolicyConfig, verifier: Judge, position: int = 0) -> tuple[Drawn, Judged, int]:
    given: Any = verifier
    drawn = draw(source(config), 2, Sampler(2, "d" * 64), *source(config).problems(0))
    return refill(source(config), given, 2, drawn, judge(given, drawn), position)


@pytest.mark.parametrize("refills", [1], indirect=True)
def test_groups_without_spread_are_replaced_by_other_problems(asked: Any) -> None:
    """Half of four groups teach, so two are missing and four are asked for; more than the batch is cut."""
    drawn, judged, position = filled(CONFIG, Judge(SPREAD, FLAT, SPREAD, FLAT, *[SPREAD] * 4))
    assert [len(prompts) for _, prompts, _ in asked] == [4, 4]
    assert {model for model, _, _ in asked} == {f"sums@{'d' * 12}"}
    assert asked[0][2].seed != asked[1][2].seed
    assert not {problem.question for problem in drawn.problems[:4]} & {
        one.question for one in drawn.problems[4:]
    }
    assert (len(judged.rewards), sum(judged.teaching), drawn.position) == (
        8,
        6,
        source(CONFIG).problems(0)[1],
    )
    data, row = take_step(drawn, judged, CONFIG)
    # Each of two samples, of the first four groups that teach.
    assert (len(data), row["groups_kept"]) == (8, 6)
    assert all(any(datum.loss_fn_inputs["advantages"].data) for datum in data)
    # The next step's replacements are others, and a step that is repeated gets the same.
    again = filled(CONFIG, Judge(SPREAD, FLAT, SPREAD, FLAT, *[SPREAD] * 4))
    later = filled(CONFIG, Judge(SPREAD, FLAT, SPREAD, FLAT, *[SPREAD] * 4), position)
    assert again[0].problems == drawn.problems
    assert later[0].problems[4:] != drawn.problems[4:]
    assert later[2] > position


@pytest.mark.parametrize(
    ("refills", "rewards", "more"),
    [
        (0, [FLAT] * 4, 0),
        (1, [FLAT] * 4, 4),
        (2, [FLAT] * 4, 8),
        (2, [SPREAD, FLAT, FLAT, FLAT], 8),
        (3, [SPREAD, FLAT, FLAT, None], 12),
        (1, [SPREAD, SPREAD, SPREAD, FLAT], 2),
        (1, [SPREAD] * 4, 0),
    ],
    indirect=["refills"],
)
def test_the_refill_has_a_bound(asked: Any, rewards: list[Any], more: int) -> None:
    drawn, judged, _ = filled(CONFIG, Judge(*rewards, otherwise=FLAT))
    assert (len(drawn.groups), len(judged.rewards)) == (4 + more, 4 + more)
    assert len(asked) == 1 + bool(more)


@pytest.mark.parametrize("refills", [1], indirect=True)
def test_only_losses_that_drop_groups_refill(trained: Any, asked: Any) -> None:
    """A run's position in the stream of replacements is in its rows, where a restarted run finds it."""
    rewards = [SPREAD, FLAT, FLAT, FLAT]
    for loss, requests in (("grpo", 2), ("dapo", 4)):
        asked.clear()
        config = CONFIG.model_copy(update={"loss": loss, "steps": 2})
        done, _ = trained(Judge(*(rewards if loss == "grpo" else [*rewards, *rewards]) * 2), config)
        assert len(asked) == requests
        positions = [row["replaced"] for row in done.curve]
        assert positions == [0, 0] if loss == "grpo" else 0 < positions[0] < positions[1]
        assert [row["groups_kept"] for row in done.curve] == ([1, 1] if loss == "grpo" else [2, 2])
        assert [row["kept"] for row in done.curve] == [0.25, 0.25]


@pytest.mark.parametrize("refills", [1], indirect=True)
def test_a_sampler_that_expires_before_the_refill_is_replaced(
    trained: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step's revision is to sample the fourth step; it answers the draw, and not its refill."""
    sampled, old = rollout_data.sample_groups, f"sums@{1:012d}"

    def expiring(url: str, key: str, model: str, prompts: Any, sampling: Sampling) -> list[list[Sample]]:
        if model == old and any(one == old for one, _, _ in asked):
            raise NotFound(f"Unknown model {model!r}.")
        return sampled(url, key, model, prompts, sampling)

    monkeypatch.setattr(rollout_data, "sample_groups", expiring)
    monkeypatch.setattr(loop, "wait_fixed", lambda seconds: wait_none())
    config = CONFIG.model_copy(update={"staleness": 2})
    done, _ = trained(Judge(*[SPREAD, FLAT] * 50), config)
    # Groups of one step have one sampler: the fourth step was drawn again by the newest revision.
    assert [row["staleness"] for row in done.curve] == [0, 1, 2, 0, 2, 2]
    assert done.curve[3]["digest"] == done.curve[3]["handed"]
    assert [model for model, _, _ in asked].count(old) == 1


# Before training


def tried(*rewards: Sequence[float] | None) -> Trial:
    samples = [Sample((7,), (-1.0,), f"says {g}") for g in range(2)]
    problems = [Problem("addition", f"{p} + 1 =", str(p + 1)) for p in range(len(rewards))]
    drawn = Drawn(Sampler(0, None), problems, [[5]] * len(rewards), [samples] * len(rewards), 9, 0.1)
    faults = Counter({"timeout": sum(reward is None for reward in rewards)})
    config = CONFIG.model_copy(update={"contract": "boxed"})
    return Trial.of("sums", config, drawn, Judged([*rewards], +faults))


@pytest.mark.parametrize(
    ("rewards", "can_learn", "sentence"),
    [
        ([SPREAD, FLAT], True, "GRPO can learn: 1 of 2 groups have spread (mean reward 0.25)."),
        (
            [FLAT, (1.0, 1.0)],
            False,
            "GRPO cannot learn: 0 of 2 groups have spread (mean reward 0.50). Choose",
        ),
        ([(1.0, 1.0)] * 2, False, "There is nothing to learn: the base earns the full reward"),
        ([None, None], False, "GRPO cannot learn: the verifier failed on every group (timeout: 2)."),
    ],
)
def test_a_trial_says_whether_grpo_can_learn(rewards: list[Any], can_learn: bool, sentence: str) -> None:
    trial = tried(*rewards)
    assert trial.can_learn is can_learn
    assert trial.verdict.startswith(sentence)


def test_a_trials_rows_show_the_best_answer_beside_the_expected_one() -> None:
    rows = [group.row() for group in tried((0.0, 0.5), None).groups]
    assert rows[0] == {
        "question": "0 + 1 =", "expected": r"\boxed{1}", "best answer": "says 1", "rewards": "0 0.5",
    }  # fmt: skip
    assert rows[1]["rewards"] == "verifier failed"


@pytest.fixture
def settings(tiny_base: Path, tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "params.json"
    policy = {"task": "addition", "suite": "s", "group_size": 8}
    given = {
        "state_dir": str(tmp_path),
        "base": {"name": str(tiny_base)},
        "policies": {"sums": policy},
        "engine": {"port": free_port()},
    }
    file.write_text(json.dumps(given))
    (tmp_path / "local.key").write_text("secret")
    return file


def test_the_command_samples_32_answers_of_the_base(
    settings: Path, asked: Any, monkeypatch: pytest.MonkeyPatch, tiny_base: Path
) -> None:
    monkeypatch.setattr(EngineClient, "marker", lambda self: {})
    monkeypatch.setattr(
        tryout, "judge", lambda verifier, drawn: Judged([(0.0, 1.0) * 4, *[(0.0,) * 8] * 3], Counter())
    )
    said = graftwork("policy", "try", "sums", "--params", str(settings))
    assert said.returncode == 0, said.stderr
    ((model, prompts, sampling),) = asked
    assert (model, len(prompts) * sampling.group_size) == (tiny_base.name, 32)
    assert "1 of 4 groups" in said.stdout
    assert "0 1 0 1 0 1 0 1" in said.stdout
    found = json.loads(graftwork("policy", "try", "sums", "--json", "--params", str(settings)).stdout)
    assert (found["can_learn"], len(found["groups"]), len(found["groups"][0]["answers"])) == (True, 4, 8)


def test_without_an_engine_the_command_says_so_at_once(settings: Path) -> None:
    said = graftwork("policy", "try", "sums", "--params", str(settings))
    assert said.returncode == 7
    assert "engine" in said.stderr
    assert graftwork("policy", "try", "nobody", "--params", str(settings)).returncode == 2


# A collapse


class Collapsing(Client):
    """A trainer whose tokens lose their entropy from the fourth step on."""

    def forward_backward(self, session: SessionInfo, *given: Any, **named: Any) -> dict[str, Any]:
        found = super().forward_backward(session, *given, **named)
        return {"metrics": found["metrics"] | {"entropy": 2.0 if session.step < 3 else 0.1}}


@pytest.mark.parametrize("collapse", ["ignore", "warn", "stop"])
def test_a_collapse_is_told_once_and_stops_a_run_that_says_so(
    trained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, collapse: str
) -> None:
    """The mean of three steps falls below 60% of the first three's at the fifth: (2 + 0.1 + 0.1) / 3."""
    client = Collapsing()
    monkeypatch.setattr(sys.modules[__name__], "Client", lambda: client)
    config = CONFIG.model_copy(update={"collapse": collapse, "steps": 7})
    verifier = Judge(otherwise=SPREAD)
    if collapse == "stop":
        with pytest.raises(ConfigError, match=r"'sums'.*Step 5: "):
            trained(verifier, config)
    else:
        trained(verifier, config)
    told = [row.get("collapse") for row in client.history]
    if collapse == "ignore":
        assert told == [None] * 7
        return
    assert told[:4] == [None] * 4
    assert "2.00 to 0.73 nats" in told[4]
    assert told[4].count("'answer ") == 2
    # The same sign is not told again.
    assert told[5:] == ([] if collapse == "stop" else [None, None])
    if collapse == "stop":
        # Started again it stops again, and goes on once it only warns.
        with pytest.raises(ConfigError, match="Step 5: "):
            trained(verifier, config)
        trained(verifier, config.model_copy(update={"collapse": "warn"}))
        assert len(client.history) == 7


def test_the_ledger_is_told_which_line_made_a_revision(trained: Any) -> None:
    made, client = trained(Judge(otherwise=SPREAD))
    told = client.told["revisions", f"sums-1@{made.digest}"]
    wanted = {"policy": "sums", "digest": made.digest, "parent": None, "session": "sums-1", "step": made.step}
    wanted |= {"tokens": sum(row["tokens"] for row in client.history)}
    assert {name: told[name] for name in wanted} == wanted
    assert ("train_steps", f"sums-1-{made.step}") in client.told
