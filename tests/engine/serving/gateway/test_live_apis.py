"""The live engine through the gateway: unmodified clients on every API, exact usage, tenants."""

import asyncio
import json
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from lm_eval.__main__ import cli_evaluate

from engine.catalog.catalog import Policy
from engine.clients.engine import EngineClient
from engine.evaluation.conversations import exchange_of, follow_up_body
from engine.serving.gateway.route_table import OF_CHOICES, ROUTES
from tests.helpers.access_matrix import ROLE_SETS, Names, gateway_faults
from tests.helpers.live import RunningEngine, eventually, server_and_core
from tests.helpers.slow_schemas import slow_schema

TURNS = [{"role": "user", "content": "What is 3 + 4?"}]
BODIES = {
    "/v1/completions": {"prompt": [7, 8, 9], "max_tokens": 6, "ignore_eos": True},
    "/v1/chat/completions": {"messages": TURNS, "max_completion_tokens": 6, "ignore_eos": True},
    "/v1/responses": {"input": "What is 3 + 4?", "max_output_tokens": 6, "ignore_eos": True},
    "/v1/messages": {"messages": TURNS, "max_tokens": 6},
}
CITY = {"type": "object", "properties": {"city": {"enum": ["a", "b"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}


@pytest.fixture(scope="module")
def policy(engine: RunningEngine) -> str:
    engine.catalog.policies.add(Policy("api-sums", engine.base_digest, {}, "test", time.time()))
    return "api-sums"


@pytest.fixture(scope="module")
def tenant(engine: RunningEngine, policy: str) -> str:
    """A key for that policy alone; there are no unlimited keys but the installation's own."""
    return engine.catalog.keys.create("api", ["infer", "pin", "feedback"], ["api-*"])


def row_of(engine: RunningEngine, request_id: str) -> tuple[str, int, int]:
    """Return state and tokens of a request in the usage log, once it is closed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(engine.state / "usage" / "usage.db")) as connection:
            query = "SELECT state, prompt, completion FROM requests WHERE id LIKE ?"
            row = connection.execute(query, (f"%{request_id}",)).fetchone()
        if row and row[0] != "admitted":
            return row
        time.sleep(0.02)
    raise AssertionError(f"{request_id} is not settled.")


def usage_of(told: dict) -> tuple[int, int]:
    return (
        told.get("prompt_tokens", told.get("input_tokens")),
        told.get("completion_tokens", told.get("output_tokens")),
    )


@pytest.mark.parametrize("path", BODIES)
def test_a_policy_is_served_by_every_api_and_counted(
    engine: RunningEngine, policy: str, tenant: str, path: str
):
    headers = {"authorization": f"Bearer {tenant}"}
    with httpx.Client(base_url=engine.url, headers=headers, timeout=60) as client:
        whole = client.post(path, json={"model": policy, **BODIES[path]})
        assert whole.status_code == 200, whole.text
        assert (whole.json()["model"], whole.headers["x-graftwork-revision"]) == (policy, "base")
        request_id = whole.headers["x-request-id"]
        assert whole.json()["id"].endswith(request_id)
        want = usage_of(whole.json()["usage"])
        assert row_of(engine, request_id) == ("settled", *want)
        assert want[0] > 0
        assert 0 < want[1] <= 6
        streamed = client.post(path, json={"model": policy, **BODIES[path], "stream": True, "temperature": 0})
        assert streamed.status_code == 200
        state, prompt, completion = row_of(engine, streamed.headers["x-request-id"])
        assert (state, prompt) == ("settled", want[0])
        assert 0 < completion <= 6
        has_usage = '"usage":{' in streamed.text
        assert has_usage == (path not in ("/v1/completions", "/v1/chat/completions"))


def observed(engine: RunningEngine, request_id: str) -> dict[str, Any]:
    """Return the observation of a request, which no controller takes from this engine's spool."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        lines = [line for file in (engine.state / "spool").glob("*.jsonl") for line in file.open()]
        found.extend(row for line in lines if request_id in line for row in [json.loads(line)])
        return bool(found)

    assert eventually(is_there)
    return found[0]


@contextmanager
def stopped_core(engine: RunningEngine) -> Iterator[None]:
    """Stop the process that computes tokens; the one that answers requests runs."""
    _, core = server_and_core(engine.process.pid)
    core.suspend()
    try:
        yield
    finally:
        core.resume()


@pytest.mark.parametrize("path", BODIES)
def test_every_api_tells_its_end_and_who_leaves_pays(
    engine: RunningEngine, policy: str, tenant: str, path: str
):
    length = {name: 1 for name in BODIES[path] if "tokens" in name}
    bill = {"usage": {"input_tokens": -(10**9), "output_tokens": 0}}
    headers = {"authorization": f"Bearer {tenant}"}
    # The first schema that has to be tried waits for a process.
    with httpx.Client(base_url=engine.url, headers=headers, timeout=120) as client:
        # Greedy: a token that is drawn may have no text, and then the answer is empty.
        body = {"model": policy, **BODIES[path], **length, "temperature": 0}
        for is_stream in (False, True):
            said = client.post(path, json=body | {"stream": is_stream})
            row = observed(engine, said.headers["x-request-id"])
            assert (row["status"], row["outcome"], row["completion_tokens"]) == (200, "truncated", 1), path
        body |= {"stream": True, **dict.fromkeys(length, 200)}
        if path == "/v1/responses":
            body["tools"] = [{"type": "function", "name": "f", "parameters": bill}]
        # A stopped worker cannot end the answer before its user leaves.
        with stopped_core(engine):
            with client.stream("POST", path, json=body) as leaving:
                assert leaving.status_code == 200
                if path == "/v1/responses":
                    # The event that repeats the request, tools included.
                    assert "-1000000000" in next(line for line in leaving.iter_lines() if "data:" in line)
            state, prompt, completion = row_of(engine, leaving.headers["x-request-id"])
    assert (state, prompt > 0, completion) == ("settled", True, 0)


@pytest.mark.parametrize("path", OF_CHOICES)
def test_who_judges_reads_what_a_user_got(engine: RunningEngine, policy: str, tenant: str, path: str):
    """Whole and streamed, and the same request for another model gets the same words of the same weights."""
    told: list[dict[str, Any]] = []
    body = {"model": policy, **BODIES[path], "temperature": 0, "safety_identifier": "ann"}
    if path == "/v1/completions":
        body["prompt"] = "1 + 1"
    headers = {"authorization": f"Bearer {tenant}"}
    with EngineClient(engine.url, engine.key, "probe") as judge:
        said = []
        with httpx.Client(base_url=engine.url, headers=headers, timeout=60) as user:
            for is_stream in (False, True):
                # It asks again before each one, as it does each second: a busy machine takes long for both.
                judge.copies({policy: 1.0}, 0)
                said.append(user.post(path, json=body | {"stream": is_stream}))
        # An answer's end may be sent before it is copied.
        assert eventually(lambda: told.extend(judge.copies({policy: 1.0}, 9)["copies"]) or len(told) == 2)
        again = judge.http.post(path, json=follow_up_body(told[1]["request"]) | {"model": engine.base_name})
        assert judge.copies({}, 9)["users"] == {"streamed": [], "whole": []}
    assert [copy["answer"] for copy in told] == [one.text for one in said]
    assert [copy["request"] for copy in told] == [body | {"stream": False}, body | {"stream": True}]
    assert again.status_code == 200, again.text
    found = [
        exchange_of(path, body, is_stream, answer)
        for is_stream, answer in ((False, said[0].text), (True, said[1].text), (False, again.text))
    ]
    assert None not in found
    # A whole answer shows the first bytes of a character that a stream would wait for.
    assert len({one.answer.rstrip("\ufffd") for one in found}) == 1
    assert (found[0].question, found[0].is_first_turn) == (body.get("prompt", "What is 3 + 4?"), True)


def test_openais_client(engine: RunningEngine, policy: str, tenant: str):
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key=tenant, max_retries=0)
    chat = client.chat.completions.create(model=policy, messages=TURNS, max_tokens=4, user="u", n=2)
    assert len(chat.choices) == 2
    pieces = list(
        client.chat.completions.create(
            model=policy, messages=TURNS, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert pieces[-1].usage.completion_tokens <= 4
    assert pieces[-1].choices == []
    assert client.completions.create(model=policy, prompt="1 + 1", max_tokens=2).choices
    answer = client.responses.create(model=policy, input="1 + 1", max_output_tokens=4)
    assert answer.output is not None
    events = [
        event.type
        for event in client.responses.create(model=policy, input="1", max_output_tokens=4, stream=True)
    ]
    assert events[-1] in ("response.completed", "response.incomplete")
    # This base has no parser of tool calls.
    with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        client.chat.completions.create(
            model=policy, messages=TURNS, max_tokens=4, tools=[{"type": "function", "function": WEATHER}],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )  # fmt: skip
    schema = {"name": "city", "schema": CITY}
    shaped = client.chat.completions.create(
        model=policy,
        messages=TURNS,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    # JSON may have any space between its words, and this base may draw 40 tokens of it.
    (choice,) = shaped.choices
    said = "".join(choice.message.content.split())
    assert any(whole.startswith(said) for whole in ('{"city":"a"}', '{"city":"b"}'))
    assert choice.finish_reason == "length" or said.endswith("}")
    assert policy in {model.id for model in client.models.list()}
    assert client.models.retrieve(policy).id == policy
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=TURNS)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=policy, input="1", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="not served here"):
        client.completions.create(model=policy, prompt="1", extra_body={"cache_salt": "theirs"})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0).models.list()


SLOW_FORMATS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"structured_outputs": {"json": slow_schema()}},
    "/v1/chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": slow_schema()}}
    },
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": slow_schema()}}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": slow_schema()}}},
}


async def test_no_constraint_holds_the_engine(engine: RunningEngine, policy: str, tenant: str):
    """A pattern that compiles for seconds is refused by each API, and others are answered meanwhile."""
    headers = {"authorization": f"Bearer {tenant}"}
    async with httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=120) as client:

        async def post(path: str, **more: Any) -> httpx.Response:
            return await client.post(path, json={"model": policy, **BODIES[path], **more})

        slow = [asyncio.create_task(post(path, **more)) for path, more in SLOW_FORMATS.items()]
        assert (await post("/v1/completions")).status_code == 200
        assert not all(task.done() for task in slow)
        for answer in await asyncio.gather(*slow):
            assert answer.status_code == 400, answer.text
            assert "CPU time" in answer.text
        own = {"grammar": 'root ::= "a"'}
        assert (await post("/v1/completions", structured_outputs=own)).status_code == 403
        fine = await post("/v1/completions", structured_outputs={"choice": ["12", "34"]}, ignore_eos=False)
        assert fine.json()["choices"][0]["text"] in ("12", "34")


def test_anthropics_client(engine: RunningEngine, policy: str, tenant: str):
    import anthropic

    client = anthropic.Anthropic(base_url=engine.url, api_key=tenant, max_retries=0)
    answer = client.messages.create(model=policy, max_tokens=4, messages=TURNS, metadata={"user_id": "u"})
    assert answer.usage.output_tokens <= 4
    with client.messages.stream(model=policy, max_tokens=4, messages=TURNS) as stream:
        assert stream.get_final_message().usage.output_tokens <= 4
    assert (
        client.messages.count_tokens(model=policy, messages=TURNS).input_tokens == answer.usage.input_tokens
    )
    with pytest.raises(anthropic.NotFoundError, match="Unknown model 'nobody'"):
        client.messages.create(model="nobody", max_tokens=4, messages=TURNS)


def test_lm_eval(
    engine: RunningEngine, policy: str, tenant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its own command, in this process; it generates and compares log-likelihoods, with a tenant's key."""
    items = [{"question": f"{a} + 1 =", "answer": f" {a + 1}", "wrong": f" {a + 2}"} for a in range(8)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}},
        "test_split": "test", "doc_to_text": "question",
    }  # fmt: skip
    said = {
        "output_type": "generate_until", "doc_to_target": "answer",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    }  # fmt: skip
    chosen = {
        "output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": "{{[answer, wrong]}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    for name, task in {"sums-said": said, "sums-chosen": chosen}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))
    model = f"model={policy},base_url={engine.url}/v1/completions,tokenizer={engine.base_path}"
    command = [
        "lm_eval", "run", "--model", "local-completions", "--model_args", model,
        "--tasks", "sums-said,sums-chosen", "--include_path", str(tmp_path), "--output_path", str(tmp_path),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("OPENAI_API_KEY", tenant)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    before = requests_of(engine)
    cli_evaluate()
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert 0 <= results["sums-said"]["exact_match,none"] <= 1
    assert 0 <= results["sums-chosen"]["acc,none"] <= 1
    assert requests_of(engine) - before == 8 + 2 * 8


def requests_of(engine: RunningEngine) -> int:
    """Return how many requests of the tenant are settled, once all that were admitted are.

    The end of one is written a moment after its answer.
    """
    with closing(sqlite3.connect(engine.state / "usage" / "usage.db")) as connection:
        admitted = "SELECT count(*) FROM requests WHERE tenant = 'api' AND state = 'admitted'"
        assert eventually(lambda: connection.execute(admitted).fetchone() == (0,))
        return connection.execute("SELECT total(requests) FROM hours WHERE tenant = 'api'").fetchone()[0]


@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_leaves_pays_for_what_was_computed(
    engine: RunningEngine, policy: str, prompts: int
):
    """For the tokens that it has got at least, also those of samples that had ended by then."""
    key = engine.catalog.keys.create("api", ["infer", "score"], ["api-*"])
    prompt: list[Any] = [7, 8, 9] if prompts == 1 else [[7, 8, 9]] * prompts
    body = {"model": policy, "prompt": prompt, "max_tokens": 240, "n": 1024 // prompts, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=60) as client:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            seen = ended = 0
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    seen += bool(choice["text"])
                    ended += choice["finish_reason"] is not None
                if ended == 500:
                    break
        state, prompt_tokens, completion = await asyncio.to_thread(
            row_of, engine, response.headers["x-request-id"]
        )
    assert (state, prompt_tokens) == ("settled", 3 * prompts)
    assert seen <= completion < 1024 * 240


def test_another_tenants_policy_is_as_absent_on_the_live_engine(engine: RunningEngine, tenant: str):
    engine.catalog.policies.add(Policy("theirs-sums", engine.base_digest, {}, "other", time.time()))
    headers = {"authorization": f"Bearer {tenant}"}
    with httpx.Client(base_url=engine.url, headers=headers, timeout=60) as client:
        for path, body in {**BODIES, "/tokenize": {"prompt": "1"}, "/v1/prewarm": {}}.items():
            for suffix in ("", "@a", "@" + "a" * 12):
                seen = [
                    client.post(path, json={**body, "model": f"{name}-sums{suffix}"})
                    for name in ("theirs", "absent")
                ]
                assert seen[0].status_code == 404
                assert seen[0].content.replace(b"theirs", b"") == seen[1].content.replace(b"absent", b"")
        seen = [client.get(f"/v1/models/{name}-sums") for name in ("theirs", "absent")]
        assert seen[0].content.replace(b"theirs", b"") == seen[1].content.replace(b"absent", b"")
        assert {model["id"] for model in client.get("/v1/models").json()["data"]} == {
            engine.base_name,
            "api-sums",
        }
        for path in ("/graftwork/residency", "/graftwork/loads", "/metrics"):
            assert client.get(path).status_code == 403


async def test_the_matrix_of_the_live_engine(engine: RunningEngine, policy: str):
    """Every route, method and role, for one's own policy, another tenant's and an absent one."""
    keys = engine.catalog.keys
    engine.catalog.policies.add(Policy("their-sums", engine.base_digest, {}, "other", time.time()))
    given = {who: keys.create("api", roles, ["api-*"]) for who, roles in ROLE_SETS.items()}
    given |= {"admin": engine.key, None: None, "other": keys.create("other", ["infer"], ["their-*"])}
    async with AsyncExitStack() as stack:
        clients = {
            who: await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=engine.url, timeout=60, headers={"authorization": f"Bearer {key}"} if key else {}
                )
            )
            for who, key in given.items()
        }
        other = clients.pop("other")
        assert await gateway_faults(clients, Names(policy, "their-sums", "absent-sum")) == []
        # It is there for those whose it is.
        assert (await other.get("/v1/models/their-sums")).status_code == 200
    keys.revoke(given["other"])


def test_nothing_answers_without_a_key(engine: RunningEngine):
    with httpx.Client(base_url=engine.url, timeout=60) as client:
        for route in ROUTES:
            for method in route.methods:
                status = client.request(method, route.path, json={}).status_code
                assert status == (401 if route.roles else 200), route.path
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        answer = client.options("/v1/completions", headers=preflight)
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_huge_headers_end_the_connection(engine: RunningEngine):
    url = httpx.URL(engine.url)
    with socket.create_connection((url.host, url.port), 60) as connection:
        # It may be closed before its answer is read, or before all is sent.
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (100 << 10) + b"\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 431")
    assert httpx.get(f"{engine.url}/health").status_code == 200


def test_a_revoked_key_is_refused_within_a_second(engine: RunningEngine):
    key = engine.catalog.keys.create("leaver", ["infer"], ["leaver-*"])
    with httpx.Client(base_url=engine.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        assert client.get("/v1/models").status_code == 200
        engine.catalog.keys.revoke(key)
        # Ten times the promise; `graftwork bench gateway` measures it.
        deadline = time.monotonic() + 10
        while client.get("/v1/models").status_code != 401:
            assert time.monotonic() < deadline
