"""What SFT and DPO teach, when a run stops, and which step is the best; without services."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.base.prompts import answer_ids, prompt_ids, tokenizer_of
from engine.errors import ConfigError
from engine.problems.procedural import Problem
from engine.problems.verifiers import Verifier
from engine.settings.policies import PolicyConfig
from engine.training.service.protocol import SessionInfo
from engine.training.supervised import has_stopped, preference_loss, taught, validation_interval, validations

TURNS = (
    {"role": "user", "content": "2 + 3 ="},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And one more?"},
)


@pytest.fixture(scope="module")
def source(tiny_base: Any) -> Any:
    tokenizer = tokenizer_of(tiny_base)
    return SimpleNamespace(
        config=SimpleNamespace(method="sft"),
        tokenizer=tokenizer,
        prompt_ids=lambda asked: prompt_ids(tokenizer, asked, "Be brief."),
    )


def learned(datum: Any) -> tuple[list[int], list[int]]:
    """Return a datum's prompt and what is learned after it."""
    inputs = datum.loss_fn_inputs
    tokens = [*datum.model_input.chunks[0].tokens, int(inputs["target_tokens"].data[-1])]
    assert [float(token) for token in tokens[1:]] == inputs["target_tokens"].data
    start = 1 + inputs["weights"].data.index(1.0)
    assert inputs["weights"].data == [0.0] * (start - 1) + [1.0] * (len(tokens) - start)
    return tokens[:start], tokens[start:]


def test_every_turn_of_the_assistants_is_learned_after_the_prompt_that_it_is_served_with(source: Any) -> None:
    first, last = taught(source, Problem("t", "", "6", messages=TURNS))
    for datum, turns, answer in ((first, TURNS[:1], "5"), (last, TURNS, "6")):
        prompt, tokens = learned(datum)
        assert prompt == source.prompt_ids(turns)
        assert tokens == answer_ids(source.tokenizer, answer)
        # The token that ends an answer is learned as well.
        assert tokens[-1] == source.tokenizer.eos_token_id


def test_a_greeting_that_nobody_asked_for_is_not_learned(source: Any) -> None:
    greeting = {"role": "assistant", "content": "Hello!"}
    (only,) = taught(source, Problem("t", "", "5", messages=(greeting, TURNS[0])))
    assert learned(only)[0] == source.prompt_ids((greeting, TURNS[0]))


def test_of_a_pair_the_better_answer_comes_first(source: Any) -> None:
    """SFT learns the better one alone."""
    problem = Problem("t", "2 + 3 =", "5", rejected="7")
    (alone,) = taught(source, problem)
    pair = list(taught(SimpleNamespace(**{**vars(source), "config": SimpleNamespace(method="dpo")}), problem))
    assert alone == pair[0]
    assert [source.tokenizer.decode(learned(one)[1][:-1]) for one in pair] == ["5", "7"]


def test_the_preference_loss_is_that_of_the_paper() -> None:
    sums, base = [-3.0, -9.0, -700.0, -1.0], [-4.0, -8.0, -1.0, -700.0]
    gain = torch.tensor(sums) - torch.tensor(base)
    expected = -torch.nn.functional.logsigmoid(0.3 * (gain[0::2] - gain[1::2])).mean()
    assert preference_loss(sums, base, 0.3) == pytest.approx(expected.item(), rel=1e-5)


def session(*losses: float | None) -> SessionInfo:
    history = tuple({"step": step, "held_out_loss": loss} for step, loss in enumerate(losses, 1))
    return SessionInfo("s", "p", len(history), 0, 1, "base", None, history)


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ((), 1, False),
        ((3.0, 2.0, 1.0), 1, False),
        ((3.0, 1.0, None, 2.0), 1, True),
        ((3.0, 1.0, 2.0), 2, False),
        ((3.0, 1.0, 2.0, 1.0), 2, True),
        ((1.0, 2.0, 2.0), 2, True),
        ((1.0, 2.0, 2.0, 2.0), 0, False),
    ],
)
def test_a_run_stops_after_so_many_validations_without_a_better_one(
    losses: tuple[float | None, ...], patience: int, stops: bool
) -> None:
    config = PolicyConfig(task="t", suite="s", method="sft", verifier="likelihood", patience=patience)
    assert has_stopped(config, session(*losses)) is stops


def test_a_row_has_the_validation_before_its_step() -> None:
    assert [(one.step, one.loss) for one in validations(session(3.0, None, 1.0))] == [(0, 3.0), (2, 1.0)]
    assert [validation_interval(steps) for steps in (1, 10, 20, 45, 1000)] == [2, 2, 2, 5, 100]


def test_what_scores_by_probabilities_judges_no_answers() -> None:
    config = PolicyConfig(task="t", suite="s", method="sft", verifier="likelihood")
    with pytest.raises(ConfigError, match="no verifier of answers"):
        Verifier(config)


def test_a_method_refuses_settings_of_another() -> None:
    with pytest.raises(ValueError, match="likelihood"):
        PolicyConfig(task="t", suite="s", verifier="likelihood")
    with pytest.raises(ValueError, match="generated task"):
        PolicyConfig(task="addition", suite="s", method="sft")
    # A recipe that fits the base may have a setting of GRPO's.
    sft = PolicyConfig(task="t", suite="s", method="sft", verifier="exact", loss_config={"kl": 0.04})
    dpo = PolicyConfig(task="t", suite="s", method="dpo", verifier="exact", loss_config={"beta": 0.3})
    assert (sft.loss_fn, sft.loss_sent()) == ("cross_entropy", {})
    assert (dpo.loss_fn, dpo.loss_sent()) == ("dpo", {"beta": 0.3})
