"""The main job's own parts: the form of the bad revision, and users who rate by the policy's verifier."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.problems.procedural import Problem
from engine.problems.verifiers import Verifier
from engine.settings.params import load_params, resolve_policy
from engine.settings.policies import PolicyConfig
from flows.demo import ask, bad_form
from flows.entry import on_base
from tests.helpers.repository import ROOT


@pytest.mark.parametrize(
    ("base", "verifier", "contract", "steps"),
    [
        ("tiny-dense", "contract", "json", 12),
        ("smollm2-135m", "python:engine.problems.language:not_short_answer", "terse", 4),
    ],
)
def test_the_bad_revision_learns_another_rule_than_its_policy(
    base: str, verifier: str, contract: str, steps: int
) -> None:
    params = on_base(load_params(ROOT / "params.yaml"), base)
    form = bad_form(params)
    config, policy = resolve_policy(params, form.policy, form.changes()).config, params.policy(form.policy)
    assert (config.verifier, config.contract) == (verifier, contract)
    assert (config.verifier, config.contract) != (policy.verifier, policy.contract)
    assert config.steps == steps < policy.steps
    assert not form.scored


class Chat:
    """A client that answers every question with `text` and keeps what is posted."""

    def __init__(self, text: str):
        said = SimpleNamespace(id="r1", choices=[SimpleNamespace(message=SimpleNamespace(content=text))])
        self.asked: list[dict[str, Any]] = []
        self.posted: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._said = said

    async def _create(self, **request: Any) -> SimpleNamespace:
        self.asked.append(request)
        return self._said

    async def post(self, path: str, body: dict[str, Any], cast_to: type) -> None:
        self.posted.append({"path": path, **body})


def test_a_user_rates_by_the_policys_verifier() -> None:
    config = PolicyConfig(task="t", suite="s", verifier="exact", max_tokens=7, system="Be terse.")
    client = Chat("Paris")
    with Verifier(config) as verifier:
        for answer in ("Paris", "London"):
            asyncio.run(ask(client, "facts", config, verifier, Problem("t", "Capital?", answer)))
    assert client.posted == [
        {"path": "/feedback", "request_id": "r1", "reward": 1.0},
        {"path": "/feedback", "request_id": "r1", "reward": 0.0},
    ]
    assert {request["max_tokens"] for request in client.asked} == {7}
    opening = {"role": "system", "content": "Be terse."}
    assert client.asked[0]["messages"] == [opening, {"role": "user", "content": "Capital?"}]


def test_a_user_asks_a_chat_as_it_is_trained() -> None:
    config = PolicyConfig(task="t", suite="s", verifier="exact", system="Be terse.")
    turns = (
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "4?"},
    )
    client = Chat("4")
    with Verifier(config) as verifier:
        asyncio.run(ask(client, "facts", config, verifier, Problem("t", "4?", "4", messages=turns)))
    assert client.asked[0]["messages"] == [{"role": "system", "content": "Be terse."}, *turns]
