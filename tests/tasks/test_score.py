"""Scoring: lm-eval through an OpenAI endpoint gives what the verifier gives, and each row once."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.base.families import BaseShapes
from engine.catalog.opening import open_catalog
from engine.errors import ConfigError, NotFound, ServiceError
from engine.ledger.ledger import Ledger, open_snapshot
from engine.ledger.queries import latest_scores, newest_items
from engine.problems.procedural import Problem, render, reward
from engine.problems.verifiers import RULES
from engine.settings.params import BaseConfig, Params
from engine.settings.policies import PolicyConfig
from engine.settings.services import EngineConfig
from flows.entry import check
from tasks import steps
from tasks.score import ask_engine, score, scores
from tasks.suites import build_suite, freeze, load_suite
from tests.helpers.command_line import graftwork
from tests.helpers.json_server import JsonAnswers
from tests.helpers.parity import RANK, random_adapter
from tests.helpers.rows import NEW, OLD, fill

BASE, DIGEST, KEY = "b" * 64, "d" * 64, "gw-" + "0" * 40


class FakeEngine(ThreadingHTTPServer):
    """Answers /graftwork/marker and /v1/completions; `answer(model, prompt)` makes the texts."""

    def __init__(self, answer, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.status, self.bodies, self.headers = answer, status, [], []


class Handler(JsonAnswers, BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"plugin": "0.1.0", "base": BASE})

    def do_POST(self):
        body = self.body()
        self.server.bodies.append(body)
        self.server.headers.append(dict(self.headers))
        # vLLM sends the choices of a list of prompts in the order of their index; any order is allowed.
        texts = [self.server.answer(body["model"], prompt) for prompt in body["prompt"]]
        choices = [{"index": index, "text": text} for index, text in enumerate(texts)]
        self.reply({"id": "cmpl-1", "choices": choices[::-1]}, self.server.status)


@pytest.fixture
def serve():
    servers = []

    def start(answer, status=200):
        server = FakeEngine(answer, status)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def suites(tmp_path):
    root = tmp_path / "suites"
    prompt = "<|user|>{}<|assistant|>".format
    build_suite("sums", "addition", "json", prompt, count=50, root=root)
    return root


def settings(tmp_path, server):
    engine = EngineConfig(port=server.server_address[1], max_num_seqs=16)
    return Params(state_dir=tmp_path / "state", engine=engine, suites_dir=tmp_path / "suites")


def right_on_even_answers(suite):
    items = {item.prompt: item for item in suite.items}

    def answer(model, prompt):
        item = items[prompt]
        return render("json" if int(item.answer) % 2 == 0 else "terse", item.answer)

    return answer


def test_the_score_is_what_the_verifier_gives_each_item(serve, suites, tmp_path):
    suite = load_suite("sums", suites)
    answer = right_on_even_answers(suite)
    server = serve(answer)
    result = score(settings(tmp_path, server), "arithmetic", DIGEST, "sums", KEY)
    expected = [
        reward("json", Problem("addition", item.question, item.answer), answer("", item.prompt))
        for item in suite.items
    ]
    assert [item.score for item in result.items] == expected
    assert [item.item for item in result.items] == [item.id for item in suite.items]
    assert result.mean == sum(expected) / 50
    assert 0 < result.mean < 1
    assert result.ci_low < result.mean < result.ci_high


def test_the_engine_gets_the_frozen_text_greedy_under_the_served_name(serve, suites, tmp_path):
    suite = load_suite("sums", suites)
    server = serve(right_on_even_answers(suite))
    score(settings(tmp_path, server), "arithmetic", DIGEST, "sums", KEY)
    sent = sorted(prompt for body in server.bodies for prompt in body["prompt"])
    assert sent == sorted(item.prompt for item in suite.items)
    for body in server.bodies:
        assert body["model"] == "arithmetic@dddddddddddd"
        assert (body["temperature"], body["max_tokens"], body["stop"]) == (0, 32, [])
        assert body["add_special_tokens"] is False
    assert {headers["x-graftwork-purpose"] for headers in server.headers} == {"score"}
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}


def ingest(params):
    ledger = Ledger(params.paths.ledger)
    new = ledger.ingest(params.paths.spool)
    ledger.snapshot(params.paths.ledger_snapshot)
    ledger.close()
    return new


def test_scoring_twice_doubles_nothing_and_asks_once(serve, suites, tmp_path):
    server = serve(right_on_even_answers(load_suite("sums", suites)))
    params = settings(tmp_path, server)
    first = score(params, "arithmetic", DIGEST, "sums", KEY)
    # The scores, and an estimate for each target.
    assert ingest(params) == 52
    asked = len(server.bodies)
    second = score(params, "arithmetic", DIGEST, "sums", KEY)
    assert second.reused
    assert len(server.bodies) == asked
    assert second.items == first.items
    again = score(params, "arithmetic", DIGEST, "sums", KEY, reuse=False)
    assert not again.reused
    assert len(server.bodies) == 2 * asked
    assert again.items == first.items
    assert ingest(params) == 0


def test_the_base_is_scored_once_for_all_policies_and_apart_from_revisions(serve, suites, tmp_path):
    server = serve(right_on_even_answers(load_suite("sums", suites)))
    params = settings(tmp_path, server)
    base = score(params, "arithmetic", None, "sums", KEY)
    assert server.bodies[0]["model"] == "tiny-dense"
    ingest(params)
    assert score(params, "other", None, "sums", KEY).items == base.items
    assert score(params, "other", None, "sums", KEY).reused
    assert not score(params, "arithmetic", DIGEST, "sums", KEY).reused


def test_scores_by_an_older_rule_are_not_those_of_the_suite(serve, tmp_path, monkeypatch):
    root, problems = tmp_path / "suites", [Problem("own", f"What is {n}?", str(n)) for n in range(3)]
    freeze("own", "own", {"verifier": "numeric"}, problems, "<{}>".format, 1, 32, root)
    params = settings(tmp_path, serve(lambda model, prompt: "1"))
    monkeypatch.setitem(RULES, "numeric", 1)
    assert score(params, "mine", DIGEST, "own", KEY).suite_version == "1"
    ingest(params)
    assert score(params, "mine", DIGEST, "own", KEY).reused
    monkeypatch.setitem(RULES, "numeric", 2)
    newer = score(params, "mine", DIGEST, "own", KEY)
    assert (newer.suite_version, newer.reused) == ("1.2", False)
    assert ingest(params) == 5
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        rows = latest_scores(ledger, BASE, "mine", "own", DIGEST)
        newest = newest_items(ledger, BASE, "mine", "own", DIGEST).values()
    assert {row.version for row in rows} == {"1", "1.2"}
    assert {row["suite_version"] for row in newest} == {"1.2"}


def test_an_unknown_suite_lists_the_known_ones(suites, tmp_path):
    with pytest.raises(NotFound, match=r"'ghost'.*suites: sums"):
        score(Params(state_dir=tmp_path, suites_dir=suites), "arithmetic", DIGEST, "ghost", KEY)


def test_an_engine_that_is_down_or_refuses_is_a_sentence(serve, suites, tmp_path, monkeypatch):
    server = serve(lambda model, prompt: "", status=503)
    monkeypatch.setattr("lm_eval.models.api_models.wait_exponential", lambda **_: lambda state: 0)
    params = settings(tmp_path, server)
    with pytest.raises(ServiceError, match=r"arithmetic@dddddddddddd.*503"):
        score(params, "arithmetic", DIGEST, "sums", KEY)
    assert not params.paths.spool.exists()
    server.shutdown()
    server.server_close()
    with pytest.raises(ServiceError, match=r"engine at.*answer"):
        score(params, "arithmetic", DIGEST, "sums", KEY)


REVISIONS = [("arithmetic", digit * 64) for digit in "abc"] + [("other", "d" * 64), ("arithmetic", None)]


def by_model(suite):
    """Each model is right on other items."""
    items = {item.prompt: item for item in suite.items}

    def answer(model, prompt):
        item = items[prompt]
        is_right = (int(item.id) + len(model) + ord(model[-1])) % 3
        return render("json" if is_right else "terse", item.answer)

    return answer


def test_several_revisions_in_one_pass_score_as_one_after_another(serve, suites, tmp_path):
    server = serve(by_model(load_suite("sums", suites)))
    params = settings(tmp_path, server)
    together = list(scores(params, REVISIONS, "sums", KEY))
    sent = [body["model"] for body in server.bodies]
    one_by_one = [score(params, *one, "sums", KEY) for one in REVISIONS]
    assert [replace(one, seconds=0.0) for one in together] == [
        replace(one, seconds=0.0) for one in one_by_one
    ]
    assert len({one.mean for one in together}) > 1
    # Five share the engine's batch of 16, twice: six rows each, so that several are asked for at once.
    assert {len(body["prompt"]) for body in server.bodies[: len(sent)]} == {6, 2}
    assert sent != sorted(sent, key=[*dict.fromkeys(sent)].index)
    # 50 scores of each, and an estimate for each target.
    assert ingest(params) == 52 * len(REVISIONS)
    assert all(one.reused for one in scores(params, REVISIONS, "sums", KEY))
    mixed = list(scores(params, [*REVISIONS, ("new", "e" * 64)], "sums", KEY))
    assert [one.reused for one in mixed] == [True] * len(REVISIONS) + [False]


def test_a_revision_that_is_deleted_meanwhile_leaves_the_others_their_scores(
    serve, suites, tmp_path, monkeypatch
):
    class Deleted(Handler):
        def do_POST(self):
            body = self.body()
            if body["model"].startswith("arithmetic@b"):
                return self.reply({"error": "The revision was deleted."}, 404)
            choices = [{"index": index, "text": "1"} for index in range(len(body["prompt"]))]
            return self.reply({"id": "cmpl-1", "choices": choices})

    monkeypatch.setattr("lm_eval.models.api_models.wait_exponential", lambda **_: lambda state: 0)
    server = serve(None)
    server.RequestHandlerClass = Deleted
    params, scored = settings(tmp_path, server), []
    with pytest.raises(ServiceError, match=r"did not score arithmetic@bbbbbbbbbbbb on sums.*deleted"):
        scored.extend(scores(params, REVISIONS, "sums", KEY))
    assert [(one.policy, one.digest) for one in scored] == [one for one in REVISIONS if one[1] != "b" * 64]
    assert ingest(params) == 52 * len(scored)


def test_a_part_of_the_items_can_be_asked_for(serve, suites, tmp_path):
    suite = load_suite("sums", suites)
    server = serve(by_model(suite))
    params = settings(tmp_path, server)
    whole = score(params, *REVISIONS[0], "sums", KEY)
    (wait,) = ask_engine(params, REVISIONS[:1], suite, KEY, [7, 3])
    assert wait() == ((whole.items[7], whole.items[3]), 0)


def test_what_was_asked_for_is_answered_though_nobody_asks_for_more(serve, suites, tmp_path, monkeypatch):
    """The engine is asked later than the list of answers ends."""

    class Busy(ThreadPoolExecutor):
        def __init__(self, workers):
            super().__init__(workers)
            self.submit(time.sleep, 0.2)

    monkeypatch.setattr("tasks.score.ThreadPoolExecutor", Busy)
    suite = load_suite("sums", suites)
    params = settings(tmp_path, serve(by_model(suite)))
    (wait,) = ask_engine(params, REVISIONS[:1], suite, KEY, [7, 3])
    assert [one.item for one in wait()[0]] == ["0007", "0003"]


def test_a_verifier_that_disagrees_with_itself_gives_no_scores(serve, tmp_path, monkeypatch):
    root, problems = tmp_path / "suites", [Problem("own", f"What is {n}?", str(n)) for n in range(3)]
    (tmp_path / "moody.py").write_text(
        "seen = []\ndef judge(question, answer, text):\n"
        "    seen.append(question)\n    return seen.count(question) % 2\n"
        "def calm(question, answer, text):\n    return len(question) % 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, function in (("moody", "judge"), ("calm", "calm")):
        rule = {"verifier": f"python:moody:{function}"}
        freeze(name, name, rule, problems, "<{}>".format, 1, 32, root)
    params = settings(tmp_path, serve(lambda model, prompt: "1"))
    params = params.model_copy(update={"python_modules": ("moody",)})
    with pytest.raises(ConfigError, match=r"moody:judge disagrees with itself.*0000 scored 1, and then 0"):
        score(params, "mine", DIGEST, "moody", KEY)
    assert not params.paths.spool.exists()
    assert score(params, "mine", DIGEST, "calm", KEY).mean in (0.0, 1.0)


def test_the_command_scores_several_on_a_suite_that_is_not_their_own(serve, suites, tmp_path, monkeypatch):
    server = serve(by_model(load_suite("sums", suites)))
    policies = {name: {"task": "addition", "suite": "own"} for name in ("one", "two")}
    build_suite("own", "addition", "terse", "<{}>".format, count=10, root=suites)
    file = tmp_path / "params.yaml"
    engine = {"port": server.server_address[1], "max_num_seqs": 16}
    places = {"state_dir": str(tmp_path / "state"), "suites_dir": str(suites)}
    file.write_text(json.dumps({**places, "policies": policies, "engine": engine}))
    monkeypatch.setattr("engine.services.lifecycle.require_running", lambda params: None)
    monkeypatch.setattr("flows.cli.score.local_key", lambda params: KEY)
    done = graftwork("score", "one", "two", "--suite", "sums", "--json", "--params", str(file))
    rows = json.loads(done.stdout)
    assert [(row["policy"], row["suite"], row["items"]) for row in rows] == [
        ("one", "sums", 50), ("two", "sums", 50),
    ]  # fmt: skip
    items = suites / "sums" / "items.jsonl"
    items.write_text(items.read_text().replace("0001", "0101", 1))
    refused = graftwork("score", "one", "--suite", "sums", "--params", str(file))
    assert refused.returncode == 2
    assert "freeze a new version" in " ".join(refused.stderr.split())


def test_the_live_engine_answers_frozen_prompts_as_it_answers_chats(engine, suites):
    params = Params(
        state_dir=engine.state,
        suites_dir=suites,
        base=BaseConfig(name=str(engine.base_path)),
        engine=EngineConfig(port=int(engine.url.rpartition(":")[2]), max_num_seqs=16),
    )
    result = score(params, "arithmetic", None, "sums", engine.key)
    assert result.base == engine.base_digest
    with engine.client() as client:
        for item, scored in list(zip(load_suite("sums", suites).items, result.items, strict=True))[:8]:
            body = {
                "messages": [{"role": "user", "content": item.question}],
                "temperature": 0,
                "max_tokens": 32,
            }
            answer = client.post("/v1/chat/completions", json=body | {"model": engine.base_name}).json()
            assert answer["choices"][0]["message"]["content"] == scored.answer


def test_what_a_policy_keeps_is_scored_for_base_champion_and_revision(serve, suites, tmp_path):
    server = serve(by_model(load_suite("sums", suites)))
    params = settings(tmp_path, server).model_copy(update={"suites_dir": suites})
    params.state_dir.mkdir()
    with open_catalog(params.paths, migrated=True) as catalog:
        fill(catalog)
    steps.score_kept.fn(params, "sorting", NEW, "sums", KEY)
    asked = {body["model"] for body in server.bodies}
    assert asked == {"tiny-dense", f"sorting@{OLD[:12]}", f"sorting@{NEW[:12]}"}
    ingest(params)
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        assert len(latest_scores(ledger, BASE, "sorting", "sums", OLD)) == 50


def test_a_suite_to_keep_that_does_not_exist_is_refused_before_anything_starts(suites, tmp_path):
    policies = {"mine": PolicyConfig(task="addition", suite="sums", keeps="ghost")}
    params = Params(state_dir=tmp_path, suites_dir=suites, policies=policies)
    with pytest.raises(NotFound, match=r"'ghost'.*sums"):
        check(params, ["mine"])


def test_the_live_engine_scores_six_adapters_and_the_base_in_one_pass_to_the_same_byte(engine, suites):
    """More adapters than slots, answers that are generated; twice, one pass and one after another."""
    params = Params(
        state_dir=engine.state,
        suites_dir=suites,
        base=BaseConfig(name=str(engine.base_path)),
        engine=EngineConfig(port=int(engine.url.rpartition(":")[2]), max_num_seqs=64),
    )
    shapes = BaseShapes.of(json.loads((engine.base_path / "config.json").read_text())).modules()
    names = [engine.publish("pass", random_adapter(shapes, 70 + i, size=0.05), RANK) for i in range(6)]
    found = [engine.catalog.revisions.get(*name.split("@")) for name in names]
    revisions = [("pass", None), *(("pass", one.digest) for one in found)]
    given = {"suite": "sums", "key": engine.key, "reuse": False}
    started = time.monotonic()
    together = list(scores(params, revisions, **given))
    middle = time.monotonic()
    alone = [score(params, *one, **given) for one in revisions]
    print(f"one pass {middle - started:.2f} s, one after another {time.monotonic() - middle:.2f} s")
    assert [one.items for one in together] == [one.items for one in alone]
    assert len({one.items for one in together}) > 4
