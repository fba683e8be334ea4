"""Suites without a verifier: scored by the probability of their answers, through lm-eval."""

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.base.prompts import answer_ids, prompt_text, tokenizer_of
from engine.problems.procedural import Problem
from engine.settings.params import BaseConfig, Params
from engine.settings.services import EngineConfig
from tasks.score import score
from tasks.suites import Suite, freeze
from tests.helpers.json_server import JsonAnswers

PROBLEMS = [
    Problem("mine", "Which is warmer?", "The sun.", rejected="The moon is."),
    Problem("mine", "Which is colder?", "The moon.", rejected="A sun!"),
    Problem("mine", "What is 2 + 3?", "5", rejected="7"),
]


def chance(token: int) -> float:
    """The log-probability of a token, wherever it stands."""
    return -(token % 13) / 10 - 0.05


class Handler(JsonAnswers, BaseHTTPRequestHandler):
    """An engine that gives each token its own chance, and echoes prompts."""

    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.reply({"plugin": "0.1.0", "base": "b" * 64})

    def do_POST(self) -> None:
        body = self.body()
        self.bodies.append(body)
        choices = []
        for index, tokens in enumerate(body["prompt"]):
            values = [None, *map(chance, tokens[1:]), -1.0]
            logprobs = {"token_logprobs": values, "top_logprobs": [{"x": value} for value in values]}
            choices.append({"index": index, "text": "", "logprobs": logprobs})
        self.reply({"id": "cmpl-1", "choices": choices[::-1]})


@pytest.fixture
def params(tmp_path: Path, tiny_base: Path) -> Iterator[Params]:
    Handler.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Params(
        state_dir=tmp_path / "state",
        suites_dir=tmp_path / "suites",
        base=BaseConfig(name=str(tiny_base)),
        engine=EngineConfig(port=server.server_address[1], max_num_seqs=16),
    )
    server.shutdown()
    server.server_close()


def frozen(params: Params, tiny_base: Path, verifier: str) -> Suite:
    tokenizer = tokenizer_of(tiny_base)

    def target(answer: str) -> tuple[str, int]:
        return answer + tokenizer.eos_token, len(answer_ids(tokenizer, answer))

    rule = {"verifier": verifier}
    return freeze(
        "mine", "mine", rule, PROBLEMS, lambda text: prompt_text(tokenizer, text), 1, 24, params.suites_dir,
        target=target,
    )  # fmt: skip


@pytest.mark.parametrize("template_end", ["", "\n"])
def test_the_likelihood_of_an_answer_is_that_of_its_tokens_and_its_end(
    params: Params, tiny_base: Path, template_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a prompt that ends in white space, as ChatML's do."""
    given = prompt_text
    monkeypatch.setitem(globals(), "prompt_text", lambda *asked: given(*asked) + template_end)
    suite, tokenizer = frozen(params, tiny_base, "likelihood"), tokenizer_of(tiny_base)
    scored = score(params, "mine", "d" * 64, "mine", "key")
    answers = [answer_ids(tokenizer, one.answer) for one in PROBLEMS]
    means = [sum(map(chance, ids)) / len(ids) for ids in answers]
    assert [item.score for item in scored.items] == pytest.approx([math.exp(mean) for mean in means])
    # The mean over tokens, as a validation has it while a policy is trained.
    assert scored.held_out_loss == pytest.approx(
        -sum(sum(map(chance, ids)) for ids in answers) / sum(map(len, answers))
    )
    # All items in one request, each with its prompt and answer as training has them.
    (body,) = Handler.bodies
    wanted = [
        tokenizer.encode(item.prompt, add_special_tokens=False) + answer_ids(tokenizer, item.answer)
        for item in suite.items
    ]
    assert sorted(body["prompt"]) == sorted(wanted)


def test_a_preference_is_for_the_answer_that_is_likelier_for_its_length(
    params: Params, tiny_base: Path
) -> None:
    frozen(params, tiny_base, "preference")
    tokenizer = tokenizer_of(tiny_base)

    def for_length(answer: str) -> float:
        return sum(map(chance, answer_ids(tokenizer, answer))) / len(answer + tokenizer.eos_token)

    scored = score(params, "mine", None, "mine", "key")
    expected = [float(for_length(one.answer) > for_length(one.rejected)) for one in PROBLEMS]
    assert [item.score for item in scored.items] == expected
    assert 0 < sum(expected) < len(expected)
    assert scored.held_out_loss is None
