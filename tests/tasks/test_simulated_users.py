"""Simulated users: what they ask, how many rate, what they met of each revision, and when they leave."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from engine.errors import ConfigError, ServiceError
from engine.problems.procedural import Problem, split
from engine.problems.verifiers import Verifier
from engine.settings.params import Params, load_params
from engine.settings.policies import PolicyConfig
from tasks.simulated_users import Crowd, Population, ask, users, wait_for_release
from tests.helpers.command_line import graftwork
from tests.helpers.json_server import JsonAnswers
from tests.helpers.live import eventually


class Chat:
    """A client that answers every question with `text` and keeps what is posted."""

    def __init__(self, text: str):
        choices = [SimpleNamespace(message=SimpleNamespace(content=text))]
        self.asked: list[dict[str, Any]] = []
        self.posted: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._said = SimpleNamespace(id="r1", model="facts@abc", choices=choices)

    async def _create(self, **request: Any) -> SimpleNamespace:
        self.asked.append(request)
        return self._said

    async def post(self, path: str, body: dict[str, Any], cast_to: type) -> None:
        self.posted.append({"path": path, **body})


def asked_once(client: Chat, config: PolicyConfig, problem: Problem, rates: bool = True) -> Crowd:
    """Ask one question as one user; return the crowd of that user."""
    crowd = Crowd("facts")
    with Verifier(config) as verifier:
        asyncio.run(ask(client, "u", config, verifier if rates else None, problem, crowd))
    return crowd


def test_a_user_rates_by_the_policys_verifier() -> None:
    config = PolicyConfig(task="t", suite="s", verifier="exact", max_tokens=7, system="Be terse.")
    client = Chat("Paris")
    rewards = [
        asked_once(client, config, Problem("t", "Capital?", answer)).revisions["facts@abc"].reward
        for answer in ("Paris", "London")
    ]
    assert rewards == [1.0, 0.0]
    assert client.posted == [
        {"path": "/feedback", "request_id": "r1", "reward": 1.0},
        {"path": "/feedback", "request_id": "r1", "reward": 0.0},
    ]
    assert {request["max_tokens"] for request in client.asked} == {7}
    opening = {"role": "system", "content": "Be terse."}
    assert client.asked[0]["messages"] == [opening, {"role": "user", "content": "Capital?"}]


def test_a_user_who_rates_nothing_only_asks() -> None:
    client = Chat("Paris")
    config = PolicyConfig(task="t", suite="s", verifier="exact")
    crowd = asked_once(client, config, Problem("t", "Capital?", "Paris"), rates=False)
    assert (client.posted, crowd.answered, crowd.revisions["facts@abc"].reward) == ([], ["r1"], None)


def test_a_user_asks_a_chat_as_it_is_trained() -> None:
    config = PolicyConfig(task="t", suite="s", verifier="exact", system="Be terse.")
    turns = (
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "4?"},
    )
    client = Chat("4")
    asked_once(client, config, Problem("t", "4?", "4", messages=turns))
    assert client.asked[0]["messages"] == [{"role": "system", "content": "Be terse."}, *turns]


class Site(JsonAnswers, BaseHTTPRequestHandler):
    """An engine and a controller: a fifth of the users meets a revision, until a release ends by ratings."""

    asked: list[dict[str, Any]]
    rated: list[dict[str, Any]]
    fails: bool
    # Ratings after which the release ends; None where there is no release.
    enough: int | None
    numbers: Iterator[int]

    def do_GET(self) -> None:
        release = {
            "id": "r7", "policy": "sums", "revision": "ab" * 32, "skip_gates": {}, "created_at": 1.0,
            "updated_at": 3.0, "reason": "Better.",
            "state": "promoted" if len(self.rated) >= (self.enough or 0) else "running",
        }  # fmt: skip
        if self.path.startswith("/releases?"):
            return self.reply([] if self.enough is None else [release | {"state": "running"}])
        self.reply(release if self.path.startswith("/releases/") else {"id": "sums"})

    def do_POST(self) -> None:
        body = self.body()
        if self.path.endswith("/feedback"):
            self.rated.append(body)
            return self.reply({})
        self.asked.append(body)
        if self.fails:
            return self.reply({"error": {"message": "too long"}}, 400)
        number = next(self.numbers)
        message = {"role": "assistant", "content": "1"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        revision = "sums@abababababab" if number % 5 == 0 else "sums"
        self.reply({"id": f"r{number}", "object": "chat.completion", "model": revision, "choices": choices})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """The settings of an installation whose engine and controller are a `Site`."""
    Site.asked, Site.rated, Site.fails, Site.enough = [], [], False, None
    # The first user meets the revision, however few come.
    Site.numbers = itertools.count()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    at = {"port": server.server_address[1]}
    policy = {"task": "addition", "suite": "addition-terse"}
    policies = {"sums": policy, "styled": policy | {"task": str(tmp_path / "train.jsonl"), "method": "sft"}}
    policies["styled"]["verifier"] = "likelihood"
    settings = {"state_dir": str(tmp_path / "state"), "engine": at, "controller": at, "policies": policies}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    params = load_params(file)
    params.state_dir.mkdir()
    params.paths.local_key.write_text("key\n")
    yield file
    server.shutdown()


@pytest.fixture
def params(site: Path) -> Params:
    return load_params(site)


def wait_for(count: int, crowd: Crowd) -> None:
    deadline = time.monotonic() + 60
    while len(crowd.answered) + len(crowd.unanswered) < count:
        assert not crowd.leaving.wait(0.01)
        assert time.monotonic() < deadline


def test_users_ask_unseen_problems_and_a_share_rates(params: Params) -> None:
    with users(params, "sums", Population(500, rated=0.5, users=7)) as crowd:
        # So many that the share of those who rate is no matter of luck: nothing here draws it.
        wait_for(120, crowd)
    assert {split(body["messages"][-1]["content"]) for body in Site.asked} == {"user"}
    assert len({body["user"] for body in Site.asked}) == 7
    # Nobody is left without an answer that came.
    assert len(Site.asked) == len(crowd.answered) == len(set(crowd.answered))
    assert 0.25 < len(Site.rated) / len(Site.asked) < 0.75
    tallies = crowd.revisions
    assert set(tallies) == {"base", "sums@abababababab"}
    assert sum(tally.ratings for tally in tallies.values()) == len(Site.rated)
    assert sum(tally.answers for tally in tallies.values()) == len(Site.asked)


def test_a_user_without_an_answer_is_counted(params: Params) -> None:
    Site.fails = True
    with users(params, "sums", Population(200)) as crowd:
        wait_for(3, crowd)
    assert not crowd.answered
    with pytest.raises(ServiceError, match="too long"):
        crowd.refuse_unanswered()


def test_without_a_verifier_of_answers_users_only_ask(params: Params, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    row = {"question": "Hello?", "answer": "Good day."}
    (tmp_path / "items.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="likelihood"), users(params, "styled", Population(9, rated=0.5)):
        pass
    with users(params, "styled", Population(200)) as crowd:
        wait_for(3, crowd)
    assert not Site.rated
    assert {body["messages"][-1]["content"] for body in Site.asked} == {"Hello?"}


def test_an_error_of_the_users_ends_the_block(params: Params, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ConfigError, match="data"), users(params, "styled", Population(9)) as crowd:
        assert crowd.leaving.wait(60)


def test_it_ends_with_the_release_and_prints_its_verdict(site: Path) -> None:
    Site.enough = 20
    done = graftwork("simulate", "sums", "--rate", "200", "--json", "--params", str(site))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["release"]["verdict"] == "promote"
    assert told["answered"] == sum(one["answers"] for one in told["revisions"]) >= 20
    assert told["unanswered"] == 0


@pytest.fixture
def late(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command's seconds begin with its first user: none may come where the machine stands still."""

    def wait(*given: Any) -> Any:
        assert eventually(lambda: Site.asked)
        return wait_for_release(*given)

    monkeypatch.setattr("tasks.simulated_users.wait_for_release", wait)


@pytest.mark.usefixtures("late")
def test_without_a_release_it_ends_after_its_seconds(site: Path) -> None:
    done = graftwork("simulate", "sums", "--rate", "20", "--seconds", "1", "--params", str(site))
    assert done.returncode == 0, done.stderr
    assert "sums@abababababab" in done.stdout
    assert "verdict" not in done.stdout


@pytest.mark.usefixtures("late")
def test_a_user_without_an_answer_fails_the_command(site: Path) -> None:
    Site.fails = True
    done = graftwork("simulate", "sums", "--seconds", "1", "--params", str(site))
    assert done.returncode == 7
    assert "too long" in done.stderr


def test_ctrl_c_ends_with_a_summary(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.simulated_users.wait_for_release", pressed)
    done = graftwork("simulate", "sums", "--json", "--seconds", "9", "--params", str(site))
    assert done.returncode == 130
    assert json.loads(done.stdout)["answered"] == len(Site.asked)
