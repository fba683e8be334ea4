"""Tenants in front of one gateway: what one of them can learn of another, and what only the gateway sets."""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY

from engine.catalog.catalog import Policy, Tenant
from engine.errors import ServiceError
from engine.serving.gateway.call import is_given_to
from engine.settings.services import GatewayConfig
from tests.helpers.access_matrix import ASKING, ROLE_SETS, SAMPLES, SENTENCE, Names, body_of, gateway_faults
from tests.helpers.adapters_cold import settle
from tests.helpers.gateways import CHAMPION, OTHER, World, open_world

PIN = f"@{CHAMPION[:12]}"
NAMES = Names("acme-sums", "umbrella-sums", "umbrello-suns")


@pytest.fixture
def world(tmp_path):
    opened = open_world(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("path", ASKING)
async def test_anothers_name_and_an_absent_one_are_the_same_bytes(world: World, path: str):
    """Every route that names a model, every role, a policy and a pinned revision, whole and as a prefix."""
    suffixes = ("", PIN, "@a", "@" + "c" * 12, f"@{OTHER}")
    for roles in ROLE_SETS.values():
        async with world.client(world.key(roles=roles)) as client:
            for suffix in suffixes:
                theirs, absent = f"umbrella-sums{suffix}", f"umbrello-suns{suffix}"
                seen = [await client.post(path, json=body_of(path, name)) for name in (theirs, absent)]
                told = [one.content.replace(b"umbrella-sums", b"umbrello-suns") for one in seen]
                assert told[0] == told[1]
                assert seen[0].status_code == seen[1].status_code >= 400
                assert headers_of(seen[0]) == headers_of(seen[1])
    assert not any(body.get("model", "").startswith("umbrella") for _, body, _ in world.server.seen)
    assert world.loads.prepared == []


def headers_of(response) -> dict[str, str]:
    return {
        name: value
        for name, value in response.headers.items()
        if name not in ("x-request-id", "content-length")
    }


def completion(model: str = "tiny", **more) -> dict:
    """Return what httpx needs for a small completion."""
    return {"url": "/v1/completions", "json": SENTENCE | {"model": model} | more}


async def test_a_tenant_reaches_its_own(world: World):
    async with world.client(world.key(roles=["infer", "pin"])) as client:
        for path in ASKING:
            if path != SAMPLES:
                for name in ("acme-sums", f"acme-sums{PIN}", "tiny"):
                    assert (await client.post(path, json=body_of(path, name))).is_success


@pytest.mark.long
async def test_the_matrix_of_routes_methods_and_roles(world: World):
    """A caller's answer is decided by the table alone: 401, 404, 405, 403, or the endpoint's own."""
    keys = {name: world.key(roles=roles) for name, roles in ROLE_SETS.items()} | {None: None}
    keys["admin"] = world.catalog.keys.create("root", "admin")
    async with AsyncExitStack() as stack:
        clients = {who: await stack.enter_async_context(world.client(key)) for who, key in keys.items()}
        assert await gateway_faults(clients, NAMES) == []


async def test_an_unknown_path_needs_a_key_and_says_nothing(world: World):
    for path in (
        "/v1/load_lora_adapter",
        "/v1/realtime",
        "/inference/v1/generate",
        "/metrics/x",
        "/v1/models/",
    ):
        async with world.client(None) as client:
            assert (await client.post(path)).status_code == 401
        async with world.client(world.key()) as client:
            assert (await client.post(path)).status_code == 404
    assert world.server.seen == []


async def test_models_lists_ones_own_policies(world: World):
    async with world.client(world.key()) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        own, theirs, absent = [
            await client.get(f"/v1/models/{name}-sums") for name in ("acme", "umbrella", "umbrello")
        ]
    assert [card["id"] for card in listed] == ["tiny", "acme-sums"]
    assert (own.status_code, own.json()["id"]) == (200, "acme-sums")
    assert theirs.content.replace(b"umbrella", b"") == absent.content.replace(b"umbrello", b"")
    assert theirs.status_code == absent.status_code == 404
    assert world.state.router.policies(10, ["acme-*"]) == ["acme-sums"]
    assert world.state.router.policies(10, ["acme-sums", "umbrella-s*"]) == ["acme-sums", "umbrella-sums"]
    assert world.state.router.policies(10, ["acme-other"]) == []
    assert world.state.router.policies(10) == ["acme-sums", "umbrella-sums"]


async def test_suggestions_name_ones_own_policies_alone(world: World):
    async with world.client(world.key(roles=["infer", "pin"])) as client:
        near = (await client.post(**completion("acme-sum"))).json()["error"]
        far = (await client.post(**completion("umbrella-sum"))).json()["error"]
        missing = (await client.post(**completion("acme-sums@c"))).json()["error"]
    assert near["nearest"] == ["tiny", "acme-sums"]
    assert far["nearest"] == ["tiny"]
    assert f"acme-sums{PIN}" in missing["nearest"]
    assert near["code"] == "model_not_found"


async def test_a_key_without_the_role_pin_sees_no_candidates(world: World):
    async with world.client(world.key()) as client:
        answers = [
            await client.post(**completion(f"acme-sums@{digits}"))
            for digits in ("a", CHAMPION[:12], "c" * 12)
        ]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.content for answer in answers}) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"n": 16384}, "n"),
        ("/v1/completions", {"n": 0}, "n"),
        ("/v1/completions", {"n": True}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 1024}, "n"),
        ("/v1/completions", {"n": 8, "prompt": ["x"] * 9}, "n"),
        ("/v1/completions", {"cache_salt": "theirs"}, "cache_salt"),
        ("/v1/completions", {"priority": -5}, "priority"),
        ("/v1/completions", {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ("/v1/completions", {"kv_transfer_params": {}}, "kv_transfer_params"),
        ("/v1/completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/completions", {"use_beam_search": True}, "use_beam_search"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"max_tokens": 1 << 60}, "max_tokens"),
        ("/v1/completions", {"stream_options": {"other": 1}}, "stream_options"),
        ("/v1/completions", {"request_id": "mine"}, "request_id"),
        ("/v1/chat/completions", {"chat_template": "{{ x }}"}, "chat_template"),
        ("/v1/chat/completions", {"top_logprobs": 4096}, "top_logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
            "messages",
        ),
        ("/v1/messages", {"system": [{"source": {"type": "url"}}]}, "system"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "1"}]}, "input"),
        ("/v1/responses", {"input": [{}] * 300}, "input"),
        ("/v1/responses", {"input": [{"role": "x", "content": "y"}]}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ("/v1/responses", {"stream": "true"}, "stream"),
        ("/v1/chat/completions", {"stream": 1}, "stream"),
        ("/v1/completions", {"echo": "yes"}, "echo"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"store": True}, "store"),
        ("/v1/responses", {"tools": [{"type": "code_interpreter"}]}, "tools"),
        ("/v1/messages", {"mcp_servers": []}, "mcp_servers"),
        ("/tokenize", {"chat_template": "{{ x }}"}, "chat_template"),
        ("/graftwork/samples", {"cache_salt": "theirs"}, "cache_salt"),
    ],
)  # fmt: skip
async def test_fields_out_of_bounds_are_refused_by_name(world: World, path: str, fields: dict, param: str):
    roles = ["score"] if path == "/graftwork/samples" else ["infer"]
    async with world.client(world.key(roles=roles)) as client:
        response = await client.post(path, json=body_of(path, "acme-sums") | fields)
    assert response.status_code == 400
    told = response.json()["error"]
    if path == "/v1/messages":
        assert told["type"] == "invalid_request_error"
        assert repr(param) in told["message"]
    else:
        assert (told["param"], told["type"]) == (param, "invalid_request_error")
    assert world.server.seen == []


def nested(depth: int) -> bytes:
    return b'{"model":"acme-sums","messages":' + b'[{"content":' * depth + b"1" + b"}]" * depth + b"}"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (nested(40), 400, "deeper"),
        (nested(500), 400, "deeper"),
        (b'{"messages":[' + b"[]," * 70_000 + b"[]]}", 413, "brackets"),
        (b'{"prompt":[' + b"7," * 70_000 + b"7]}", 413, "values"),
        (b'{"prompt":"' + b"x" * (300 << 10) + b'"}', 413, "bytes"),
    ],
)
async def test_what_would_stop_the_event_loop_is_refused_before_it_is_parsed(
    world: World, body: bytes, status: int, says: str
):
    async with world.client(world.key()) as client:
        # What this thread, which has the loop and the gateway, computes: no pause of the machine counts.
        began = time.thread_time()
        answer = await client.post("/v1/chat/completions", content=body)
        assert time.thread_time() - began < 1
    assert (answer.status_code, says in answer.text) == (status, True)


async def test_log_probabilities_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.serving.gateway.reading.MOST_LOGPROBS", 1000)
    prompts = {"model": "acme-sums", "prompt": ["x" * 100] * 4, "max_tokens": 1}
    for more in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
        async with world.client(world.key()) as client:
            assert (await client.post("/v1/completions", json=prompts | more)).status_code == 400
            assert (await client.post("/v1/completions", json=prompts | {"logprobs": 20})).status_code == 200
            copies = {"logprobs": 20, "n": 20}
            assert (await client.post("/v1/completions", json=prompts | copies)).status_code == 400
            # One completion of any length is nobody's harm.
            one = {"model": "acme-sums", "prompt": "x", "logprobs": 20, "max_tokens": 250}
            assert (await client.post("/v1/completions", json=one)).status_code == 200
            assert (await client.post("/v1/completions", json=one | {"n": 2})).status_code == 400
        async with world.client(world.key(roles=["infer", "score"])) as scorer:
            assert (await scorer.post("/v1/completions", json=prompts | more)).status_code == 200


async def test_a_session_has_a_short_name(world: World):
    async with world.client(world.key()) as client:
        for length, status in ((512, 200), (513, 400)):
            answer = await client.post(**completion("acme-sums"), headers={"x-session-id": "s" * length})
            assert answer.status_code == status


def without_key() -> float:
    labels = {"status": "401", "reason": "invalid_api_key"}
    return REGISTRY.get_sample_value("graftwork_answers_total", labels) or 0.0


async def test_requests_without_a_key_are_counted_and_said_with_a_rate(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    log = Mock()
    monkeypatch.setattr("engine.serving.gateway.gateway.log", log)
    before = without_key()
    for key in (None, "gw-" + "0" * 40, "none"):
        async with world.client(key) as client:
            assert (await client.get("/v1/models")).status_code == 401
    assert without_key() == before + 3
    assert log.warning.call_count == 1


async def test_who_has_no_key_learns_nothing_of_the_database(world: World, monkeypatch: pytest.MonkeyPatch):
    def away(_hash: str) -> None:
        raise ServiceError("The catalog postgresql://db.internal:5432/graftwork cannot be read: timeout.")

    monkeypatch.setattr(world.catalog.keys, "find_hash", away)
    async with world.client("gw-" + "1" * 40) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 503
    assert "db.internal" not in answer.text


async def test_a_suspended_tenant_is_refused_until_it_is_resumed(world: World):
    keys, mine, other = world.catalog.keys, world.key(), world.key("umbrella")
    async with world.client(mine) as client, world.client(other) as another:
        assert (await client.post(**completion("acme-sums"))).status_code == 200
        keys.suspend("acme", "It never sleeps")
        for _ in range(2):
            refused = await client.post(**completion("acme-sums"))
            assert refused.status_code == 403
            assert "It never sleeps." in refused.json()["error"]["message"]
        assert (await another.post(**completion("umbrella-sums"))).status_code == 200
        # Limits are another matter.
        keys.set_tenant(Tenant("acme", {"concurrency": 4.0}))
        assert (await client.get("/v1/models")).status_code == 403
        assert keys.resume("acme").limits == {"concurrency": 4.0}
        assert (await client.post(**completion("acme-sums"))).status_code == 200
    answered = [fields["status"] for table, fields in world.events.rows if table == "observations"]
    assert answered == [200] * 3


async def test_a_scorer_may_send_a_batch(world: World):
    body = {"model": "acme-sums", "prompt": ["x"] * 1024, "max_tokens": 1}
    async with world.client(world.key(roles=["infer", "score"])) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_what_openais_clients_add_changes_nothing(world: World):
    more = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "logit_bias": None,
        "functions": None,
    }
    async with world.client(world.key()) as client:
        assert (await client.post(**completion("acme-sums", **more))).status_code == 200
    assert world.server.seen[0][1].keys().isdisjoint(more)


async def test_headers_of_a_client_choose_no_priority_and_no_rank(world: World):
    mine = {
        "x-vllm-priority": "-999999",
        "x-data-parallel-rank": "3",
        "x-request-id": "taken",
        "x-session-id": "s",
    }
    async with world.client(world.key()) as client:
        response = await client.post(**completion("acme-sums"), headers=mine)
    _, _, got = world.server.seen[0]
    assert got["x-vllm-priority"] == "0"
    assert got["x-request-id"] == response.headers["x-request-id"] != "taken"
    assert got.keys().isdisjoint({"x-data-parallel-rank", "x-session-id", "authorization"})


async def test_a_request_has_the_proxys_id_where_the_proxy_sets_it(world: World):
    world.state.settings = GatewayConfig(proxy_sets_id=True)
    given = "0123456789abcdef" * 2
    async with world.client(world.key()) as client:
        for name, is_taken in ((given, True), (given.upper(), False), (f"{given}0", False), ("", False)):
            response = await client.post(**completion("acme-sums"), headers={"x-request-id": name})
            # The last digits say which key it was given to.
            assert (response.headers["x-request-id"][:20] == name[:20]) is is_taken
    assert repeated_rows(world) == [1] * 4
    ids = [fields["id"] for table, fields in world.events.rows if table == "observations"]
    assert sum(name.startswith(f"cmpl-{given[:20]}") for name in ids) == 1
    assert len(ids) == len(set(ids)) == 4


def repeated_rows(world: World) -> list[int]:
    """Return of each request whether a proxy asks another engine for it where this one dies."""
    world.usage.write()
    with closing(sqlite3.connect(world.root / "usage" / "usage.db")) as connection:
        return [row[0] for row in connection.execute("SELECT repeated FROM requests ORDER BY seq")]


@pytest.mark.parametrize(("is_stream", "seen"), [(False, [1, 1, 1]), (True, [1, 0, 0])])
async def test_a_proxy_asks_elsewhere_until_the_first_byte_was_sent(
    world: World, is_stream: bool, seen: list[int]
):
    """Of a whole answer no byte is sent before its end, a stream that has begun is asked nowhere else."""
    world.state.settings = GatewayConfig(proxy_sets_id=True)
    told: list[int] = []
    await ask(world, is_stream, lambda message: told.extend(repeated_rows(world)))
    # As its beginning is sent, as its first piece is (a turn of the loop later), and after its end.
    assert [*told[:2], *repeated_rows(world)] == seen


async def ask(world: World, is_stream: bool, sent: Callable[[Any], object]) -> None:
    """Ask for a completion; call `sent` before each message of its answer is sent."""
    body = json.dumps(SENTENCE | {"model": "acme-sums", "stream": is_stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    headers = [(b"authorization", f"Bearer {world.key()}".encode())]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent(message)

    await world.app(
        {"type": "http", "path": "/v1/completions", "headers": headers, "method": "POST"}, receive, send
    )


@pytest.mark.parametrize("fault", [None, (500, {"error": {"message": "It failed."}})])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_is_observed_before_its_end_is_sent(world: World, is_stream: bool, fault: Any):
    """So no kill can come between an answer that somebody has, and its row in the spool."""
    world.server.fault = fault
    at_end: list[int] = []

    def sent(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            at_end.append(len(world.events.rows))

    await ask(world, is_stream, sent)
    assert at_end == [1]
    ((table, row),) = world.events.rows
    assert (table, row["status"]) == ("observations", 200 if fault is None else 500)
    assert row["completion_tokens"] == (None if fault else SENTENCE["max_tokens"])


async def test_the_prefix_cache_is_salted_by_tenant(world: World):
    salts = {}
    for tenant, number in product(("acme", "umbrella"), range(2)):
        async with world.client(world.key(tenant)) as client:
            await client.post("/v1/completions", json=body_of("/v1/completions", f"{tenant}-sums"))
            await client.post(**completion())
        salts[tenant, number] = {body["cache_salt"] for _, body, _ in world.server.seen[-2:]}
    assert salts["acme", 0] == salts["acme", 1] != salts["umbrella", 0]
    assert all(len(found) == 1 for found in salts.values())


async def test_a_setting_shares_the_prefix_cache(tmp_path):
    world = open_world(tmp_path, GatewayConfig(shared_prefix_cache=True))
    async with world.client(world.key()) as client:
        await client.post(**completion())
    world.close()
    assert "cache_salt" not in world.server.seen[0][1]


async def test_units_are_of_a_tenant_and_of_this_installation(world: World, tmp_path_factory):
    """The same user of two tenants is two units, and nobody can compute them without the secret."""
    other = open_world(tmp_path_factory.mktemp("other"))
    units = []
    for place, tenant in ((world, "acme"), (world, "umbrella"), (other, "acme")):
        async with place.client(place.key(tenant)) as client:
            await client.post(**completion(user="u-1"))
        units.append(place.events.rows[-1][1]["unit"])
    other.close()
    assert len(set(units)) == 3
    assert all(len(unit) == 24 for unit in units)


async def test_a_release_that_runs_keeps_its_unit_hashes(world: World):
    import hashlib

    route = world.catalog.routes.get("acme-sums")
    with world.catalog.access.write() as connection:
        from engine.catalog import tables

        connection.execute(
            tables.routes.update().where(tables.routes.c.policy == "acme-sums").values(plain_units=True)
        )
    route = world.catalog.routes.get("acme-sums")
    world.catalog.routes.update(replace(route, canary=OTHER, weight=0.5), route.version)
    body = body_of("/v1/completions", "acme-sums") | {"user": "u-1"}
    async with world.client(world.key()) as client:
        await client.post("/v1/completions", json=body)
        route = world.catalog.routes.get("acme-sums")
        world.catalog.routes.update(replace(route, canary=None, weight=0.0), route.version)
        await client.post("/v1/completions", json=body)
    before, after = (row["unit"] for _, row in world.events.rows)
    assert before == hashlib.sha256(b"acme-sums\0u-1").hexdigest()[:24] != after


async def test_refused_requests_are_requests_of_the_minute(world: World, monkeypatch: pytest.MonkeyPatch):
    """Unknown policies, bad bodies: each costs the gateway work, so that a limit holds for them."""
    # The minute stands still: a slow machine refills no bucket.
    monkeypatch.setattr("engine.serving.gateway.meter.time", SimpleNamespace(monotonic=lambda: 100.0))
    key = world.key(limits={"requests_per_minute": 5})
    async with world.client(key) as client:
        refused = [(await client.post(**completion(model))).status_code for model in ["acme-nobody"] * 4]
        assert refused == [404] * 4
        assert (await client.post("/v1/completions", json={"no": "model"})).status_code == 400
        limited = await client.post(**completion("acme-sums"))
        assert limited.status_code == 429
        assert float(limited.headers["retry-after"]) >= 1
        # Being refused for the limit costs nothing more.
        for _ in range(20):
            assert (await client.get("/v1/models")).status_code == 429
    async with world.client(world.key()) as unlimited:
        assert (await unlimited.post(**completion("acme-nobody"))).status_code == 404
        assert (await unlimited.post(**completion())).status_code == 200


async def test_a_rotated_key_is_one_key(world: World):
    """It rates what its old plaintext was answered, and counts once where no single key may decide."""
    old = world.key()
    async with world.client(old) as client:
        given = (await client.post(**completion())).json()["id"]
    new = world.catalog.keys.rotate(old, overlap_s=300)
    async with world.client(new) as client:
        rated = await client.post("/v1/feedback", json={"request_id": given, "reward": 1.0})
        assert rated.status_code == 202
        await client.post(**completion())
    async with world.client(world.key()) as another:
        foreign = await another.post("/v1/feedback", json={"request_id": given, "reward": 0.0})
        assert foreign.status_code == 404
    names = {fields["key"] for _, fields in world.events.rows if "key" in fields}
    assert names == {world.catalog.keys.find(new).id}


async def test_an_answer_of_the_version_before_can_be_rated(world: World):
    """Its id was made of the key's hash."""
    key = world.catalog.keys.find(world.key())
    begin = "0" * 20
    before = begin + world.state.router.hash_once("request", key.hash, begin)[:12]
    assert is_given_to(key, before, world.state.router.hash_once)
    assert not is_given_to(replace(key, hash="other", id="other"), before, world.state.router.hash_once)


async def test_a_key_expires_and_is_rotated_with_an_overlap(world: World, monkeypatch):
    now = time.time()
    first = world.key(expires_at=now + 600)
    second = world.catalog.keys.rotate(world.catalog.keys.find(first).id, overlap_s=300)
    for key, status in ((first, 200), (second, 200)):
        async with world.client(key) as client:
            assert (await client.post(**completion())).status_code == status
    monkeypatch.setattr(world.catalog.keys, "now", lambda: now + 601)
    async with world.client(first) as client:
        assert (await client.post(**completion())).status_code == 401


async def test_a_key_is_not_trusted_while_the_catalog_is_silent(world: World, monkeypatch):
    key, router, now = world.key(), world.state.router, [100.0]
    assert router.key(key)
    monkeypatch.setattr(router.rows, "clock", lambda: now[0])
    router.key(key)

    silent = Mock(commits=Mock(side_effect=sqlite3.OperationalError("disk I/O error")))
    monkeypatch.setattr(router.rows, "watch", silent)
    now[0] += 59
    assert router.key(key)
    now[0] += 2
    with pytest.raises(ServiceError, match="60 s"):
        router.key(key)
    async with world.client(key) as client:
        response = await client.post(**completion())
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")


async def test_every_answer_has_a_request_id(world: World):
    ids = []
    for key, path in (
        (None, "/health"),
        (None, "/v1/models"),
        (world.key(), "/nothing"),
        (world.key(), "/v1/models"),
    ):
        async with world.client(key) as client:
            ids.append((await client.get(path)).headers["x-request-id"])
    assert len(set(ids)) == 4


async def test_options_say_what_is_allowed_and_pages_of_other_origins_are_not(world: World, tmp_path_factory):
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with world.client(None) as client:
        plain = await client.options("/v1/completions", headers=preflight)
        unknown = await client.options("/nothing")
    assert (plain.status_code, plain.headers["allow"]) == (204, "OPTIONS, POST")
    assert not any(name.startswith("access-control") for name in plain.headers)
    assert unknown.status_code == 401
    other = open_world(tmp_path_factory.mktemp("cors"), GatewayConfig(cors_origins=("https://app.example",)))
    async with other.client(None) as client:
        allowed = await client.options("/v1/completions", headers=preflight)
        bare = [await client.options(path) for path in ("/v1/completions", "/nothing")]
        refused = await client.post("/v1/completions", json={}, headers={"origin": "https://app.example"})
        stranger = await client.post("/v1/completions", json={}, headers={"origin": "https://evil.example"})
    other.close()
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert all(len(one.headers.get_list("x-request-id")) == 1 for one in (allowed, refused, *bare))
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
        401,
        "https://app.example",
    )
    assert "access-control-allow-origin" not in stranger.headers


async def test_errors_have_the_apis_form(world: World):
    key = world.key()
    async with world.client(key) as client:
        openai = await client.post("/v1/chat/completions", json=body_of("/v1/chat/completions", "nobody"))
        anthropic = await client.post("/v1/messages", json=body_of("/v1/messages", "nobody"))
        fault = {"message": "Too long.", "type": "BadRequestError", "param": "prompt", "code": 400}
        world.server.fault = 400, {"error": fault}
        vllms = await client.post(**completion("acme-sums"))
    assert openai.json()["error"] | {"message": "", "nearest": []} == {
        "message": "", "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        "nearest": [],
    }  # fmt: skip
    assert (anthropic.json()["type"], anthropic.json()["error"]["type"]) == ("error", "not_found_error")
    assert vllms.json()["error"] == {
        "message": "Too long.", "type": "invalid_request_error", "param": "prompt", "code": None,
    }  # fmt: skip
    assert int(vllms.headers["content-length"]) == len(vllms.content)


async def test_anthropics_header_carries_a_key(world: World):
    async with world.client(None) as client:
        response = await client.post(
            "/v1/messages", json=body_of("/v1/messages", "acme-sums"), headers={"x-api-key": world.key()}
        )
    assert response.status_code == 200


async def test_bodies_of_other_paths_are_capped(world: World):
    async with world.client(world.key()) as client:
        response = await client.post("/v1/feedback", content=json.dumps({"request_id": "x" * (65 << 10)}))
    assert response.status_code == 413
    assert world.server.seen == []


def test_policies_are_made_within_their_tenants_patterns(world: World):
    from engine.errors import Conflict

    world.key("acme")
    world.key("umbrella")
    make = world.catalog.policies.add
    with pytest.raises(Conflict, match=r"within.*'acme'"):
        make(Policy("acme-new", "base", {}, "umbrella", 0.0))
    with pytest.raises(Conflict, match=r"outside.*'acme'"):
        make(Policy("new", "base", {}, "acme", 0.0))
    make(Policy("acme-new", "base", {}, "acme", 0.0))
    make(Policy("new", "base", {}, "local", 0.0))


async def test_a_tenants_share_of_the_queue_of_cold_loads(tmp_path):
    """By default half of it; what is loaded ahead counts too."""
    world = open_world(tmp_path, load_places=8)
    row = world.catalog.revisions.get("acme-sums", CHAMPION)
    digests = [f"{number:x}" * 64 for number in range(1, 8)]
    world.catalog.revisions.add_many([replace(row, digest=digest) for digest in digests])
    world.loads.may_end.clear()
    async with (
        world.client(world.key(roles=["infer", "pin"])) as client,
        world.client(world.key("umbrella")) as other,
    ):
        bodies = [{"model": f"acme-sums@{digest[:12]}"} | SENTENCE for digest in digests]
        # Two requests for one adapter take one place.
        asked = [
            asyncio.create_task(client.post("/v1/completions", json=body)) for body in [bodies[0], *bodies]
        ]
        # No load ends, and makes room, before the last of them has asked.
        await settle(lambda: sum(task.done() for task in asked) == 3)
        another = other.post("/v1/completions", json={"model": "umbrella-sums"} | SENTENCE)
        others = asyncio.create_task(another)
        await settle(lambda: others.done() or len(world.state.residency.queue) == 5)
        world.loads.may_end.set()
        fine = await others
        found = [response.status_code for response in await asyncio.gather(*asked)]
    world.close()
    assert fine.status_code == 200
    assert found == [200] * 5 + [429] * 3
