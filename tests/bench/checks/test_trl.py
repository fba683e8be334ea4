"""The benchmark against TRL is fair: the same questions, rewards, settings and lengths. TRL is not needed."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.catalog.catalog import migrate
from engine.problems import language
from engine.problems.procedural import Problem, stream
from engine.problems.procedural import reward as earned
from engine.settings.params import Paths
from engine.training import loop
from engine.training.line_of_training import line_of
from engine.training.loss.grpo import LOSSES
from tests.helpers.bench_files import load


def test_both_sides_ask_the_same_questions(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoTokenizer

    bench = load("trl", monkeypatch)
    config = bench.policy(seed=5, steps=2)
    migrate(Paths(tmp_path).catalog_url)
    seed = line_of(Paths(tmp_path), "new", config, ["q_proj"]).seed
    ours = [problem for _, problem in islice(stream(config.task, "train", seed), 2 * config.groups)]
    theirs = load("_trl_job", monkeypatch).questions(config, tiny_base)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    assert [row["expected"] for row in theirs] == [problem.answer for problem in ours]
    for row, problem in zip(theirs, ours, strict=True):
        assert problem.question in row["prompt"]
        # As TRL encodes a text.
        assert tokenizer(row["prompt"])["input_ids"] == row["ids"]


@pytest.mark.parametrize("text", ["46", "\n\n\n46", "  46 ", "046", "46.", "4 6", "", "47", "46\n46"])
def test_both_sides_earn_the_same(text: str, monkeypatch: pytest.MonkeyPatch):
    worker = load("_trl_worker", monkeypatch)
    assert worker.reward("21 + 25 =", "46", text) == earned(
        "terse", Problem("addition", "21 + 25 =", "46"), text
    )


def test_both_sides_judge_a_real_model_by_one_function(monkeypatch: pytest.MonkeyPatch):
    job, worker = load("_trl_job", monkeypatch), load("_trl_worker", monkeypatch)
    config = load("trl", monkeypatch).policy(seed=1, steps=2, base="smollm2-135m")
    judge = worker.function(*job.own_function(config.verifier))
    recorder = worker.Recorder(judge)
    texts = ["Vilnius", "It is Vilnius.", "Riga"]
    earned_here = [language.short_answer("?", "Vilnius", text) for text in texts]
    assert recorder(texts, [[1]] * 3, ["?"] * 3, ["Vilnius"] * 3) == earned_here == [1.0, 0.5, 0.1]
    assert (config.alpha, config.warmup_steps, config.loss_config.kl) == (16, 0, 0)
    assert {"alpha", "warmup_steps", "loss_config", "lr"} <= config.model_fields_set


def test_both_sides_take_the_same_steps(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench, worker = load("trl", monkeypatch), load("_trl_worker", monkeypatch)
    config = bench.policy(seed=1, steps=3)
    task = bench.job(config, tiny_base, tmp_path, batch=32)
    theirs = worker.settings(task)
    samples = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    assert (samples, theirs["num_generations"]) == (config.groups * config.group_size, config.group_size)
    assert theirs["max_completion_length"] == config.max_tokens == 256
    assert (theirs["learning_rate"], theirs["temperature"]) == (config.lr, 1.0)
    assert (theirs["epsilon"], theirs["epsilon_high"]) == (0.2, 0.28)
    assert sorted(task["targets"]) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_only_steps_after_the_warm_ones_are_timed(monkeypatch: pytest.MonkeyPatch):
    bench = load("trl", monkeypatch)
    slow_start = bench.Run((50.0, 60.0, 62.0, 64.0), 1, (0.1, 0.2, 0.3, 0.4), (32.0,))
    assert slow_start.seconds() == 2.0
    together = bench.Run((10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0), 2, (0.5,), (32.0,))
    # Each step of a policy counts: four steps in four seconds.
    assert together.seconds() == 1.0


def test_our_runs_train_policies_that_their_settings_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = load("trl", monkeypatch)
    asked = []

    def trained(params, name, config, key, on_step):
        asked.append((name, params.policy(name)))
        curve = [{"reward": 0.5, "length_mean": 30.0, "tokens": 3840, "groups_kept": 16}] * config.steps
        for row in curve:
            on_step(row)
        return SimpleNamespace(curve=curve)

    monkeypatch.setattr(loop, "train", trained)
    named = bench.ours(1, steps=3)["three"]
    run = bench.run_ours(bench.settings(tmp_path / "base", tmp_path), named, "key")
    assert dict(asked) == named
    assert (run.policies, len(run.ends), run.rewards, run.lengths) == (3, 9, (0.5,) * 3, (30.0,) * 3)


def test_both_losses_are_a_mean_over_the_same_tokens(monkeypatch: pytest.MonkeyPatch):
    bench = load("trl", monkeypatch)
    runs = bench.ours(1, steps=3)
    (compared,), (own,) = runs["one"].values(), runs["dapo"].values()
    assert (LOSSES[compared.loss].per, LOSSES[compared.loss].drops) == ("token", False)
    assert (own.loss, LOSSES[own.loss].drops) == ("dapo", True)
    assert own.loss_config.values(own.loss) == compared.loss_config.values(compared.loss)
    assert [config.seed for config in runs["three"].values()] == [1, 101, 201]


def test_sides_that_learn_worse_or_draw_other_lengths_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    bench = load("trl", monkeypatch)
    ends, even = (1.0,) * 4, (32.0,) * 4
    learned = bench.Run(ends, 1, (*[0.1] * bench.LAST, *[0.6] * bench.LAST), even)
    fair = {side: [learned] * 3 for side in ("trl", "one", "dapo", "three")}
    assert bench.faults(fair) == []
    # Two standard errors of 3 seeds x 3 steps x 128 answers are 0.042.
    slower = bench.Run(ends, 1, (*[0.1] * bench.LAST, *[0.55] * bench.LAST), even)
    assert bench.faults(fair | {"three": [slower] * 3}) == ["three has a reward of 0.550, TRL one of 0.600."]
    near = bench.Run(ends, 1, (*[0.1] * bench.LAST, *[0.57] * bench.LAST), even)
    assert bench.faults(fair | {"one": [near] * 3}) == []
    still = [bench.Run(ends, 1, (0.6,) * 4, even)] * 3
    assert len(bench.faults(dict.fromkeys(fair, still))) == 4
    short = [bench.Run(ends, 1, learned.rewards, (20.0,) * 4)] * 3
    assert bench.faults(fair | {"one": short}) == ["one drew a mean length of 20.0 tokens, not about 32."]
