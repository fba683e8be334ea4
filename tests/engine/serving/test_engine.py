"""The live engine: adapters served equal PEFT's, base rows stay the base's, bad adapters hurt nobody."""

import asyncio
import json
import os
import time
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection
from itertools import product
from pathlib import Path

import httpx
import pytest
import torch

from engine.base.families import BaseShapes
from engine.catalog.catalog import Policy
from engine.catalog.revision_rows import location
from engine.clients.engine import EngineClient
from engine.errors import NotFound
from engine.serving.gateway.uvicorn_accept import HANDLES
from engine.settings.params import load_params
from tasks.residency import residency
from tests.helpers.live import RunningEngine, StockServer
from tests.helpers.parity import RANK, Reference, ask, base_rows, prompts, random_adapter

# Log-probabilities in float32 by two implementations, docs/benchmarks/correctness.md: 2e-6 to 2e-5 measured.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def shapes(tiny_base: Path):
    from transformers import AutoConfig

    return BaseShapes.of(AutoConfig.from_pretrained(tiny_base).to_dict()).modules()


def test_marker_names_our_parts(engine: RunningEngine, shapes):
    marker = httpx.get(f"{engine.url}/graftwork/marker").json()
    assert marker["base"] == engine.base_digest
    assert marker["workers"][0]["operations"] == ["GroupedPunica"]
    # Seven projections of a layer are four modules of the engine: qkv, o, gate_up and down.
    assert marker["workers"][0]["modules"] == len(shapes) // 7 * 4


def test_the_engine_takes_up_bursts_of_connections(engine: RunningEngine):
    """vLLM hands its own socket to the server that listens by several handles."""
    port = f":{httpx.URL(engine.url).port:04X} "
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines() if port in line]
    (inode,) = {line[9] for line in lines if line[3] == "0A"}
    links = []
    for process in Path("/proc").glob("[0-9]*"):
        # Other processes end meanwhile, also between two looks at one of them, or are not ours.
        with suppress(OSError):
            for number in os.listdir(process / "fd"):
                with suppress(OSError):
                    links.append(os.readlink(process / "fd" / number))
    assert links.count(f"socket:[{inode}]") >= HANDLES


def test_a_connection_that_was_idle_is_still_good(engine: RunningEngine):
    """A client that keeps connections for 5 s or less never meets one that the server is just closing."""
    url = httpx.URL(engine.url)
    with closing(HTTPConnection(url.host, url.port, timeout=60)) as connection:
        for pause in (0, 6):
            time.sleep(pause)
            # Without `auto_open` it would quietly connect anew.
            connection.auto_open = 0 if pause else 1
            connection.request("GET", "/graftwork/marker")
            assert connection.getresponse().read()


def test_a_chat_comes_in_pieces_and_a_wrong_name_is_a_sentence(engine: RunningEngine):
    turns = [{"role": "user", "content": "What is 3 + 4?"}]
    body = {"model": engine.base_name, "messages": turns, "temperature": 0, "max_tokens": 64}
    with engine.client() as plain, EngineClient(engine.url, engine.key) as client:
        whole = plain.post("/v1/chat/completions", json=body | {"ignore_eos": True}).json()
        client.find_model(engine.base_name)
        with client.chat(body | {"ignore_eos": True}) as (revision, pieces):
            found = list(pieces)
        assert (revision, "".join(found)) == ("base", whole["choices"][0]["message"]["content"])
        # vLLM joins the tokens that a late reader has not taken: how many pieces there are is not promised.
        assert len(found) > 1
        with pytest.raises(NotFound, match=f"Known models: {engine.base_name}"):
            client.find_model("nobody")
        with pytest.raises(NotFound, match="Unknown model 'nobody'"), client.chat(body | {"model": "nobody"}):
            pass


def test_mixed_batch_equals_the_merged_reference(engine: RunningEngine, shapes):
    """Several adapters of other targets and ranks, and the base, in one batch of 24."""
    kinds = [
        random_adapter(shapes, 1),
        random_adapter(shapes, 2, ("q_proj", "v_proj")),
        random_adapter(shapes, 3, ("gate_proj", "down_proj"), rank=3),
        None,
    ]
    names = [
        engine.publish("mixed", tensors, tensors[next(iter(tensors))].shape[0])
        if tensors
        else engine.base_name
        for tensors in kinds
    ]
    requests = [(names[i % 4], prompt) for i, prompt in enumerate(prompts(24))]
    answers = asyncio.run(ask(engine, requests))
    references = [Reference(engine.base_path, kind) for kind in kinds]
    for i, answer in enumerate(answers):
        want = references[i % 4].logprobs(requests[i][1], answer["ids"])
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), want, rtol=0, atol=TOLERANCE)
        assert answer["revision"] == (names[i % 4] if kinds[i % 4] else "base")
    # The adapters must matter, or this test proves nothing.
    base = references[3].logprobs(requests[0][1], answers[0]["ids"])
    assert (torch.tensor(answers[0]["logprobs"]) - base).abs().max() > 0.1


def test_base_rows_of_a_full_mixed_batch_are_the_base(engine: RunningEngine, shapes):
    """Every slot full and base rows at every place of the batch: bit-identical to base rows alone."""
    names = [engine.publish("full", random_adapter(shapes, 20 + i, size=1.0), RANK) for i in range(4)]
    mine = prompts(24)
    alone = asyncio.run(ask(engine, [(engine.base_name, prompt) for prompt in mine]))
    answers = base_rows(engine, names, mine)
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in alone]
    assert [answer["logprobs"] for answer in answers] == [answer["logprobs"] for answer in alone]


def test_base_rows_equal_an_engine_without_lora(engine: RunningEngine, shapes):
    """The second route: stock vLLM without LoRA, on the same base and prompts."""
    names = [engine.publish("full", random_adapter(shapes, 20 + i, size=1.0), RANK) for i in range(4)]
    mine = prompts(24)
    answers = base_rows(engine, names, mine)
    with StockServer(engine.base_path, "float32", max_model_len=256) as stock:
        want = asyncio.run(ask(stock, [("stock", prompt) for prompt in mine]))
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in want]
    for answer, expected in zip(answers, want, strict=True):
        got, stock_logprobs = torch.tensor(answer["logprobs"]), torch.tensor(expected["logprobs"])
        torch.testing.assert_close(got, stock_logprobs, rtol=0, atol=1e-5)


def test_more_adapters_than_slots(engine: RunningEngine, shapes):
    """Twelve adapters through four slots, twice: every answer is its own adapter's."""
    kinds = [random_adapter(shapes, 40 + i) for i in range(12)]
    names = [engine.publish("many", tensors, RANK) for tensors in kinds]
    references = [Reference(engine.base_path, kind) for kind in kinds]
    prompt = prompts(1)[0]
    for _ in range(2):
        answers = asyncio.run(ask(engine, [(name, prompt) for name in names]))
        for reference, answer in zip(references, answers, strict=True):
            want = reference.logprobs(prompt, answer["ids"])
            torch.testing.assert_close(torch.tensor(answer["logprobs"]), want, rtol=0, atol=TOLERANCE)


def test_bad_adapters_fail_their_requests_alone(engine: RunningEngine, shapes):
    good = engine.publish("good", random_adapter(shapes, 60), RANK)
    nan = random_adapter(shapes, 61)
    nan["model.layers.1.mlp.up_proj.lora_B"][3, 2] = torch.nan
    wide = random_adapter(shapes, 62, rank=16)
    foreign = {
        key.replace("layers.0", "layers.9"): value for key, value in random_adapter(shapes, 63).items()
    }
    short = random_adapter(shapes, 64)
    short["model.layers.0.mlp.down_proj.lora_A"] = torch.zeros(RANK, 100)
    cases = {
        "layers.1.mlp.gate_up_proj.lora_B holds NaN": nan,
        "rank 16 is over the engine's maximum of 8": wide,
        "no module model.layers.9": foreign,
        "down_proj.lora_A: expected": short,
    }
    with engine.client() as client:
        for sentence, tensors in cases.items():
            rank = tensors[next(iter(tensors))].shape[0]
            name = engine.publish("bad", tensors, rank)
            response = client.post("/v1/completions", json={"model": name, "prompt": [7, 8], "max_tokens": 2})
            assert response.status_code == 422, response.text
            assert sentence in response.json()["error"]["message"]
        damaged = engine.publish("bad", random_adapter(shapes, 65), RANK)
        row = engine.catalog.revisions.get("bad", damaged.partition("@")[2])
        path, whole = engine.store.path(row.segment), engine.store.read(location(row))
        with path.open("r+b") as file:
            file.seek(row.offset + 1000)
            file.write(b"\xff" * 8)
        response = client.post("/v1/completions", json={"model": damaged, "prompt": [7], "max_tokens": 2})
        assert response.status_code == 422
        assert "damaged" in response.json()["error"]["message"]
        # Its bytes come again, at another place: the same engine serves it now.
        at = engine.store.append(whole)
        engine.catalog.places.replace(replace(row, segment=at.segment, offset=at.offset))
        response = client.post("/v1/completions", json={"model": damaged, "prompt": [7], "max_tokens": 2})
        assert response.status_code == 200, response.text
        response = client.post("/v1/completions", json={"model": good, "prompt": [7], "max_tokens": 2})
        assert response.status_code == 200


def test_where_adapters_are_is_shown_without_a_label_for_any(engine: RunningEngine, shapes):
    """Prewarmed, then in a slot; Prometheus counts loads and tiers, and has no name of a revision."""
    name = engine.publish("shown", random_adapter(shapes, 70), RANK)
    with engine.client() as client:
        response = client.post("/v1/prewarm", json={"model": name})
        assert response.status_code == 202
        assert 0 < response.json()["estimate_s"] < 60
        deadline = time.monotonic() + 30
        while name not in (told := client.get("/graftwork/residency").json())["adapters"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert told["adapters"][name]["tier"] == "host"
        asked = client.post("/v1/completions", json={"model": name, "prompt": [7], "max_tokens": 2})
        assert asked.status_code == 200
        # The worker says so a moment later.
        while (told := client.get("/graftwork/residency").json())["adapters"][name]["tier"] != "slot":
            assert time.monotonic() < deadline + 30
            time.sleep(0.02)
        metrics = client.get("/metrics").text
        for model, status, field in (("shown@xyz", 404, "nearest"), ("shown@", 404, "nearest")):
            missing = client.post("/v1/completions", json={"model": model, "prompt": [7], "max_tokens": 2})
            assert missing.status_code == status
            assert field in missing.json().get("error", missing.json())
    shown = residency(load_params(engine.state / "params.json"), 100)
    assert shown["engine"]
    assert {row["revision"]: row["tier"] for row in shown["revisions"]}[name] == "slot"
    assert told["tiers"]["slot"]["adapters"] <= 4 < told["tiers"]["host"]["max_adapters"]
    assert (told["queue"]["running"], told["queue"]["loads"]) == (0, {})
    for figure in (
        "graftwork_loads_total", "graftwork_load_wait_seconds", "graftwork_evictions_total",
        "graftwork_slot_fills_total", "graftwork_slot_evictions_total",
    ):  # fmt: skip
        assert figure in metrics
    assert 'graftwork_tier_adapters{tier="host"}' in metrics
    assert "shown@" not in metrics


def test_one_prompt_under_every_adapter_is_cached_for_each(engine: RunningEngine, shapes):
    """Whoever comes second on a prompt finds the blocks of the first one, if they are its adapter's."""
    kinds = [None, *(random_adapter(shapes, 80 + i) for i in range(2))]
    names = [engine.publish("cached", kind, RANK) if kind else engine.base_name for kind in kinds]
    prompt = prompts(1)[0] * 4
    for _ in range(2):
        for name, kind in zip(names, kinds, strict=True):
            (answer,) = asyncio.run(ask(engine, [(name, prompt)]))
            want = Reference(engine.base_path, kind).logprobs(prompt, answer["ids"])
            torch.testing.assert_close(torch.tensor(answer["logprobs"]), want, rtol=0, atol=TOLERANCE)


def test_other_ways_in_are_closed(engine: RunningEngine):
    with engine.client() as client:
        for path in (
            "/v1/load_lora_adapter",
            "/v1/responses/x/cancel",
            "/inference/v1/generate",
            "/adapters",
        ):
            assert client.post(path, json={"model": "good"}).status_code == 404
        assert client.post("/v1/completions", json={"model": "nobody", "prompt": "x"}).status_code == 404
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names[0] == engine.base_name
        assert not any("@" in name for name in names)
    assert httpx.post(f"{engine.url}/v1/completions", json={}).status_code == 401


def test_answers_of_the_base_carry_the_model_that_was_asked_for(engine: RunningEngine):
    """A policy without a champion and the base itself, by each endpoint, whole and streamed."""
    engine.catalog.policies.add(Policy("unproven", engine.base_digest, {}, "test", time.time()))
    asked = {
        "/v1/completions": {"prompt": [7, 8]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "1 + 2 ="}]},
    }
    with engine.client() as client:
        for model, (path, body) in product(("unproven", engine.base_name), asked.items()):
            body = {"model": model, "max_tokens": 2, **body}
            whole = client.post(path, json=body)
            assert (whole.json()["model"], whole.headers["x-graftwork-revision"]) == (model, "base")
            streamed = client.post(path, json=body | {"stream": True}).text
            chunks = [
                line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")
            ]
            assert {json.loads(chunk)["model"] for chunk in chunks} == {model}


def test_a_model_is_retrieved_by_name_and_the_base_by_its_directory(engine: RunningEngine):
    """As OpenAI's client does; the settings of this engine name the base by its directory."""
    engine.catalog.policies.add(Policy("retrieved", engine.base_digest, {}, "test", time.time()))
    directory = str(engine.base_path)
    with engine.client() as client:
        for name in ("retrieved", engine.base_name, directory):
            assert client.get(f"/v1/models/{name}").json()["id"] == name
        unknown = client.get("/v1/models/retrieve")
        answer = client.post("/v1/completions", json={"model": directory, "prompt": [7], "max_tokens": 1})
    assert unknown.status_code == 404
    assert "retrieved" in unknown.json()["error"]["nearest"]
    assert (answer.json()["model"], answer.headers["x-graftwork-revision"]) == (directory, "base")
    assert httpx.get(f"{engine.url}/v1/models/retrieved").status_code == 401


def test_a_chat_of_the_data_is_what_the_engine_renders(engine: RunningEngine):
    """A row's messages, rendered here for training, and by vLLM for a user who sends them."""
    from engine.base.prompts import prompt_ids, tokenizer_of
    from engine.problems.rows import row_of

    said = (("system", "Be terse."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 7?"))
    messages = [{"role": role, "content": content} for role, content in said]
    row = row_of({"messages": messages, "answer": "9"}, "d:1")
    body = {"model": engine.base_name, "messages": messages, "max_tokens": 1, "return_token_ids": True}
    with engine.client() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == prompt_ids(tokenizer_of(engine.base_path), row.asked)


@pytest.mark.parametrize(("tokens", "answered"), [(232, 24), (233, 23)])
def test_the_longest_prompt_that_policy_create_takes_has_a_whole_answer(
    engine: RunningEngine, tokens: int, answered: int
):
    """`PromptLimits` takes 256 - 24 tokens; one more costs a token of the answer, without a word."""
    body = {"model": engine.base_name, "prompt": [7] * tokens, "max_tokens": 24, "ignore_eos": True}
    with engine.client() as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, answered)


def test_chat_and_completion_see_the_same_tokens(engine: RunningEngine):
    from transformers import AutoTokenizer

    from engine.base.prompts import prompt_ids, prompt_text

    tokenizer = AutoTokenizer.from_pretrained(engine.base_path)
    question = "What is 12 + 7?"
    with engine.client() as client:
        common = {"model": engine.base_name, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        chat = client.post(
            "/v1/chat/completions", json={**common, "messages": [{"role": "user", "content": question}]}
        ).json()
        text = client.post(
            "/v1/completions", json={**common, "prompt": prompt_text(tokenizer, question)}
        ).json()
        ids = client.post(
            "/v1/completions", json={**common, "prompt": prompt_ids(tokenizer, question)}
        ).json()
    want = prompt_ids(tokenizer, question)
    assert chat["prompt_token_ids"] == want
    assert text["choices"][0]["prompt_token_ids"] == want
    assert ids["choices"][0]["prompt_token_ids"] == want
    assert (
        chat["choices"][0]["token_ids"] == text["choices"][0]["token_ids"] == ids["choices"][0]["token_ids"]
    )
