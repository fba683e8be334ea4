"""The training loop on a live engine and trainer: alone, beside others, broken off and gone on, stale."""

import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.base.prompts import tokenizer_of
from engine.base.resident import ensure_base
from engine.errors import ConfigError, NotFound
from engine.ledger.ledger import Ledger
from engine.problems.procedural import Problem, stream
from engine.problems.verifiers import Verifier
from engine.security.credentials import credential
from engine.settings.params import Params, load_params
from engine.settings.policies import PolicyConfig
from engine.threads import in_parallel
from engine.training import rollout_data
from engine.training.line_of_training import line_of
from engine.training.loop import (
    PROBE_PROMPTS,
    PROBE_TOKENS,
    Trained,
    export_revision,
    sampler_of,
    samples_of,
    train,
)
from engine.training.rollout_data import Drawn, Judged, Sampler, judge
from engine.training.sample_groups import Sample, sample_groups
from engine.training.service.protocol import SessionInfo
from tests.helpers.live import RunningEngine, free_port, stop_group
from tests.helpers.taken_step import take_step

STEPS = 4
# Of one token's ratio in float32: measured 1e-6, over 4 handoffs and over 100.
TOKEN_TOLERANCE = 1e-4
# The base has hardly been trained: what it says earns by its form, so that groups differ.
RULES = """
import time

def vowels(question, answer, text):
    return sum(letter in "aeiou 0123" for letter in text) / max(1, len(text))

def raises_on_even(question, answer, text):
    if len(text) % 2 == 0:
        raise KeyError(text)
    return vowels(question, answer, text)

def hangs_on(question, answer, text):
    if text == "hang":
        time.sleep(600)
    return float(text == "right")
"""


@dataclass(frozen=True)
class Loop:
    """A live engine and trainer on one state."""

    params: Params
    key: str

    def train(self, policy: str, on_step: Callable[..., None] | None = None, **changes: Any) -> Trained:
        settings = {
            "task": "addition", "suite": "addition-terse", "verifier": "python:loop_rules:vowels",
            "groups": 4, "group_size": 4, "max_tokens": 6, "rank": 4, "steps": STEPS, "lr": 1e-2, "seed": 5,
        }  # fmt: skip
        config = PolicyConfig(**{**settings, **changes})
        changed = {"policies": {policy: config}, "python_modules": ("loop_rules",)}
        params = self.params.model_copy(update=changed)
        return train(params, policy, config, self.key, on_step)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of verifiers in the working directory, where a policy's own is looked for."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / "loop_rules.py").write_text(RULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def loop(engine: RunningEngine, rules: None) -> Iterator[Loop]:
    """The trainer beside the engine of all tests, on its state. It never fuses: digests are compared."""
    given = json.loads((engine.state / "params.json").read_text())
    file = engine.state / "trainer.json"
    file.write_text(json.dumps(given | {"trainer": {"port": free_port(), "fuse": "never"}}))
    params = load_params(file)
    # As `graftwork up` makes it, before anybody asks the trainer.
    credential(params.paths, "trainer")
    command = [sys.executable, "-m", "engine.training.service.app", "--params", str(file)]
    with (engine.state / "trainer.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    yield Loop(params, engine.key)
    stop_group(process)


@pytest.fixture(scope="module")
def alone(loop: Loop) -> Trained:
    return loop.train("alone")


@pytest.fixture(scope="module")
def stale(loop: Loop) -> Trained:
    return loop.train("stale", staleness=2)


def ratios(trained: Trained) -> list[float]:
    return [row["importance_ratio"] for row in trained.curve]


def furthest(trained: Trained) -> float:
    """Return how far from 1 any token's ratio was in any step: means hide one that is wrong."""
    extremes = [row[name] for row in trained.curve for name in ("ratio_min", "ratio_max")]
    return max(abs(ratio - 1) for ratio in extremes)


@pytest.mark.timeout(600)
def test_beside_others_a_policy_becomes_what_it_is_alone(loop: Loop, alone: Trained) -> None:
    """Three in threads, of other ranks, places, seeds and losses; one has the settings of the one alone."""
    twin, *others = in_parallel(
        partial(loop.train, "twin"),
        partial(loop.train, "other", rank=8, seed=9, targets=("q_proj", "down_proj")),
        partial(loop.train, "third", rank=1, seed=10, loss="grpo", lr=3e-2),
    )
    assert twin.digest == alone.digest
    assert all(other.digest != alone.digest for other in others)
    assert [row["reward"] for row in twin.curve] == [row["reward"] for row in alone.curve]
    # It has learned something; equal adapters that never moved would prove nothing.
    assert any(row["groups_kept"] and row["grad_norm"] > 0 for row in alone.curve)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_beside_eight_others_it_is_the_same_after_five_steps(loop: Loop) -> None:
    single = loop.train("single", steps=5, rank=8)
    ranks = (1, 2, 4, 8)
    calls = [partial(loop.train, f"beside-{i}", steps=5, seed=20 + i, rank=ranks[i % 4]) for i in range(8)]
    twin, *_ = in_parallel(partial(loop.train, "ninth", steps=5, rank=8), *calls)
    assert twin.digest == single.digest


@pytest.mark.timeout(300)
def test_sampler_and_trainer_agree(alone: Trained) -> None:
    assert ratios(alone) == pytest.approx([1.0] * STEPS, abs=1e-3)
    assert furthest(alone) < TOKEN_TOLERANCE
    # Two implementations round differently somewhere; a constant would not.
    assert any(row["ratio_min"] < 1 < row["ratio_max"] for row in alone.curve)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sampler_and_trainer_agree_over_a_hundred_handoffs(loop: Loop) -> None:
    trained = loop.train("long", steps=101, lr=2e-3)
    assert sum(row["handoff_s"] > 0 for row in trained.curve) == 100
    assert ratios(trained) == pytest.approx([1.0] * 101, abs=1e-3)
    assert furthest(trained) < TOKEN_TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_flow_that_dies_goes_on_as_if_it_had_not(
    loop: Loop, alone: Trained, stale: Trained, staleness: int
) -> None:
    whole = {0: alone, 2: stale}[staleness]

    def die(row: Mapping[str, Any]) -> None:
        if row["step"] == 3:
            raise KeyboardInterrupt

    cut = f"cut-{staleness}"
    with pytest.raises(KeyboardInterrupt):
        loop.train(cut, die, staleness=staleness)
    steps: list[int] = []
    resumed = loop.train(cut, lambda row: steps.append(row["step"]), staleness=staleness)
    assert steps == [4]
    assert resumed.digest == whole.digest
    assert [row["digest"] for row in resumed.curve] == [row["digest"] for row in whole.curve]


@pytest.mark.timeout(300)
def test_a_stale_step_is_drawn_under_the_revision_of_two_steps_before(alone: Trained, stale: Trained) -> None:
    assert [row["staleness"] for row in stale.curve] == [0, 1, 2, 2]
    assert [row["staleness"] for row in alone.curve] == [0, 0, 0, 0]
    # The first steps are drawn by the base, the last by what the first step made.
    assert [row["digest"] for row in stale.curve[:3]] == [None] * 3
    assert stale.curve[3]["digest"] == alone.curve[1]["digest"] != alone.curve[3]["digest"]
    assert ratios(stale)[0] == pytest.approx(1.0, abs=1e-3)
    assert stale.digest != alone.digest


@pytest.mark.timeout(300)
def test_an_answer_that_the_verifier_fails_on_drops_its_group(loop: Loop) -> None:
    trained = loop.train("raising", verifier="python:loop_rules:raises_on_even", steps=2)
    assert len(trained.curve) == 2
    for row in trained.curve:
        assert row["verifier_errors"] > 0
        # Four groups, and at most as many that replaced those without spread.
        assert row["groups_kept"] <= 8 - row["verifier_errors"]


@pytest.mark.timeout(300)
def test_a_question_that_is_too_long_is_asked_once_and_named(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def counted(*args: Any) -> Any:
        asked.append(args)
        return sample_groups(*args)

    monkeypatch.setattr(rollout_data, "sample_groups", counted)
    with pytest.raises(ConfigError, match=r"400.*engine\.max_model_len"):
        loop.train("too-long", system="word " * 400)
    assert len(asked) == 1


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a policy that learns how sums are answered in a sentence, and not by a number alone."""
    folder = tmp_path_factory.mktemp("taught")
    sums = [(a, b) for a in range(10, 22) for b in range(10, 20)]
    lines = [
        json.dumps({"question": f"What is {a} + {b}?", "answer": f"It is {a + b}.", "rejected": str(a + b)})
        for a, b in sums
    ]
    parts = {"train.jsonl": lines[:80], "validation.jsonl": lines[80:100]}
    for file, rows in parts.items():
        (folder / file).write_text("\n".join(rows) + "\n")
    items = [{"question": f"What is {a} + {b}?", "answer": f"It is {a + b}."} for a, b in sums[100:]]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return {
        "task": str(folder / "train.jsonl"), "method": "sft", "verifier": "likelihood", "groups": 8,
        "steps": 12, "lr": 1e-2,
    }  # fmt: skip


@pytest.mark.timeout(300)
def test_answers_are_learned_as_they_are_written(loop: Loop, taught: dict[str, Any]) -> None:
    """Alone, beside another method, and cut and gone on: the same bits. The first loss is transformers'."""

    def die(row: Mapping[str, Any]) -> None:
        if row["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train("cut-taught", die, **taught)
    cut, whole, other = in_parallel(
        partial(loop.train, "cut-taught", **taught),
        partial(loop.train, "taught", **taught),
        partial(loop.train, "prefers", **{**taught, "method": "dpo", "verifier": "preference"}),
    )
    assert cut.digest == whole.digest != other.digest
    looks = [row["held_out_loss"] for row in whole.curve if row["held_out_loss"] is not None]
    assert [row["step"] for row in whole.curve if row["held_out_loss"] is not None] == [1, 3, 5, 7, 9, 11]
    assert looks[-1] < looks[0] - 0.5
    assert whole.curve[0]["loss"] == pytest.approx(loss_by_transformers(loop, taught), abs=1e-4)
    # Before its first step the policy is the base, so neither answer has gained anything.
    first = other.curve[0]
    assert (first["loss"], first["held_out_loss"]) == pytest.approx((math.log(2), math.log(2)), abs=1e-4)
    assert other.curve[-1]["loss"] < 0.6


def loss_by_transformers(loop: Loop, taught: dict[str, Any]) -> float:
    """Return the loss of the first step's examples by transformers' own model and labels."""
    import torch
    from transformers import AutoModelForCausalLM

    base = ensure_base(loop.params.base, loop.params.paths).path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), tokenizer_of(base)
    config = PolicyConfig(suite="s", **taught)
    seed = line_of(loop.params.paths, "taught", config.model_copy(update={"seed": 5}), ()).seed
    total = count = 0.0
    for _, problem in islice(stream(config.task, "train", seed), 8):
        asked = {"role": "user", "content": problem.question}
        prompt = tokenizer.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        after = tokenizer(problem.answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        labels = torch.tensor([[-100] * len(before) + after])
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([before + after]), labels=labels).loss.item()
        total, count = total + mean * len(after), count + len(after)
    return total / count


@pytest.mark.timeout(300)
def test_a_run_that_gets_worse_stops_and_exports_its_best_step(
    loop: Loop, taught: dict[str, Any], tmp_path: Path
) -> None:
    """Held-out answers are numbers alone, less likely with each sentence; another line starts at its end."""
    folder = Path(shutil.copytree(Path(taught["task"]).parent, tmp_path / "numbers"))
    held_out = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    numbers = [json.dumps(row | {"answer": row["rejected"], "rejected": row["answer"]}) for row in held_out]
    (folder / "validation.jsonl").write_text("\n".join(numbers) + "\n")
    wild = {**taught, "task": str(folder / "train.jsonl"), "steps": 60, "patience": 2}
    trained = loop.train("wild", **wild)
    looks = {row["step"] - 1: row["held_out_loss"] for row in trained.curve if row["held_out_loss"]}
    best = min((step for step in looks if step), key=lambda step: looks[step])
    assert len(trained.curve) < 60
    assert trained.step == best
    # All that it has to do again is to export.
    steps: list[int] = []
    again = loop.train("wild", lambda row: steps.append(row["step"]), **wild)
    assert (again.digest, again.step, len(again.curve), steps) == (
        trained.digest,
        best,
        len(trained.curve),
        [],
    )
    more = loop.train("more", **{**wild, "start": f"wild@{trained.digest[:12]}", "steps": 1})
    assert more.curve[0]["held_out_loss"] == pytest.approx(looks[best], abs=1e-5)


@pytest.mark.timeout(300)
def test_every_step_reaches_the_ledger_with_its_metrics(loop: Loop, alone: Trained, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.duckdb")
    ledger.ingest(loop.params.paths.spool)
    asked = (
        "reward_std, zero_spread, ratio_min, ratio_max, clip_fraction, entropy, kl_old, length_mean, "
        "length_max, truncated, staleness, tokens_per_s, wait_s, rollout_s, backpressure_s, peak_memory, "
        "masked"
    )
    query = f"SELECT {asked} FROM train_steps WHERE policy = 'alone' ORDER BY step"
    rows = ledger.connection.execute(query).fetchall()
    assert len(rows) == STEPS
    for row in rows:
        found = dict(zip(asked.split(", "), row, strict=True))
        assert not [name for name, value in found.items() if value is None], found
        assert 0 <= found["zero_spread"] <= 1
        assert 0 <= found["truncated"] <= 1
        assert 1 <= found["length_mean"] <= found["length_max"] <= 6
        assert found["ratio_min"] <= 1 + 1e-3
        assert found["ratio_max"] >= 1 - 1e-3
        assert found["peak_memory"] > 1 << 20


def answers(*texts: Sequence[str]) -> Drawn:
    """A step's samples with these texts, a group each."""
    groups = [[Sample((7, 1), (-1.0, -0.5), text) for text in group] for group in texts]
    problems = [Problem("t", "q", "a")] * len(groups)
    return Drawn(Sampler(0, None), problems, [[40, 41]] * len(groups), groups, 9, 0.1)


def test_a_verifier_that_hangs_costs_its_group_one_limit(rules: None) -> None:
    # The answers that do not hang have the limit too: it is longer than most pauses of the machine.
    config = PolicyConfig(
        task="addition", suite="x", verifier="python:loop_rules:hangs_on", verifier_timeout_s=2
    )
    drawn = answers(["hang", "hang", "right"], ["right", "wrong", "wrong"], ["right", "right", "right"])
    with Verifier(config) as verifier:
        judged = judge(verifier, drawn)
    assert judged.errors == {"timeout": 1}
    assert judged.rewards == [None, [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    row = judged.row()
    assert (row["reward"], row["zero_spread"], row["verifier_errors"]) == (pytest.approx(4 / 6), 0.5, 1)
    assert row["verifier_faults"] == {"timeout": 1}
    # A loss that sees every group still does not see the one without rewards.
    for loss, seen in (("dapo", 3), ("grpo", 6)):
        data, row = take_step(drawn, judged, config.model_copy(update={"loss": loss}))
        assert (len(data), row["groups_kept"]) == (seen, 1)


def test_when_every_group_fails_nothing_is_learned(rules: None) -> None:
    drawn = answers(["a", "b"], ["c", "d"])
    judged = Judged([None, None], Counter({"raised KeyError": 2}))
    data, row = take_step(drawn, judged, PolicyConfig(task="addition", suite="x"))
    assert row["groups_kept"] == 0
    assert not judged.sound
    # Nobody earned nothing: a reward of zero would be read as a collapse.
    assert {judged.row()[name] for name in ("reward", "reward_std", "zero_spread")} == {None}
    assert {value for one in data for value in one.loss_fn_inputs["advantages"].data} == {0.0}


def test_a_rank_that_the_engine_does_not_serve_is_refused_before_its_first_rollout(tmp_path: Path) -> None:
    config = PolicyConfig(task="addition", suite="s", rank=16)
    params = Params(state_dir=tmp_path, policies={"sums": config})
    assert params.engine.max_rank == 8
    with pytest.raises(ConfigError, match=r"rank 16.*engine\.max_rank"):
        train(params, "sums", config, "key")


def test_which_revision_draws_a_step_is_read_from_the_session() -> None:
    history = ({"handed": None}, {"handed": "b" * 64}, {"handed": "c" * 64})
    session = SessionInfo("s", "p", 3, 0, 1, "base", None, history)
    newest = Sampler(3, "d" * 64)
    assert sampler_of(session, newest, -1) == sampler_of(session, newest, 0) == Sampler(0, None)
    assert sampler_of(session, newest, 2) == Sampler(2, "c" * 64)
    assert sampler_of(session, newest, 3) == newest


def test_an_expired_revision_is_replaced_by_the_newest_and_the_row_says_so() -> None:
    """A run that comes back after the snapshots' time has only the newest one."""
    begun: dict[int, Sampler] = {}

    class Expiring:
        def begin(self, step: int, position: int, sampler: Sampler) -> None:
            begun.setdefault(step, sampler)

        def take(self, step: int) -> Sampler:
            sampler = begun.pop(step)
            if sampler.digest == "old":
                raise NotFound("It has expired.")
            return sampler

    history = tuple({"handed": "old"} for _ in range(3))
    session = SessionInfo("s", "p", 3, 0, 1, "base", None, history)
    run = SimpleNamespace(config=SimpleNamespace(staleness=2, steps=10), ahead=Expiring())
    newest = Sampler(3, "new")
    assert samples_of(run, session, newest) == newest  # type: ignore[arg-type]
    # What can still be drawn as it was to be is left so.
    assert begun == {4: Sampler(2, "old"), 5: newest}


@pytest.mark.parametrize(("longest", "asked"), [(8, 8), (256, PROBE_TOKENS)])
def test_a_probe_of_long_answers_is_short(longest, asked):
    exports = []
    run = SimpleNamespace(
        config=SimpleNamespace(task="addition", max_tokens=longest),
        line=SimpleNamespace(seed=1),
        source=SimpleNamespace(prompt_ids=lambda question: [len(question)]),
        client=SimpleNamespace(export=lambda session, kind, **fields: exports.append((kind, fields))),
    )
    export_revision(run, None)
    ((kind, fields),) = exports
    assert (kind, fields["probe_tokens"], len(fields["probe_prompts"])) == ("revision", asked, PROBE_PROMPTS)
