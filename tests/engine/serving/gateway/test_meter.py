"""Limits and usage through the gateway: refused before they are over, and equal to the engine's own count."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Coroutine
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from prometheus_client import REGISTRY

from engine.catalog.catalog import Tenant
from engine.errors import ConfigError, LimitReached
from engine.ledger.spool import LineFile
from engine.metering import usage_log
from engine.metering.usage_log import WRITTEN_S
from engine.metering.usage_rows import DAY, Budget, Shortage
from engine.serving.gateway.call import Call
from engine.serving.gateway.meter import FairShare, Meter, TokenBucket
from tests.helpers.adapters_cold import settle
from tests.helpers.api_answers import APIS, COMPLETIONS, MESSAGES, RESPONSES, body_of
from tests.helpers.gateways import World, open_world
from tests.helpers.live import free_port

CHAT = {"model": "acme-sums", "messages": [{"role": "user", "content": "one two three"}]}
TURN = {"model": "acme-sums", "prompt": "one two three", "max_tokens": 8}


@pytest.fixture
def world(tmp_path):
    opened = open_world(tmp_path)
    yield opened
    opened.close()


def rows(world: World) -> dict[str, tuple[str, int | None, int | None, int]]:
    """Return state, tokens and reservation of each request in the usage log, by its id without a prefix.

    What has ended is written first, which would come a moment later.
    """
    world.usage.write()
    with closing(sqlite3.connect(world.root / "usage" / "usage.db")) as connection:
        found = connection.execute("SELECT id, state, prompt, completion, reserved FROM requests").fetchall()
    return {row[0].replace("resp_", "-").rpartition("-")[2]: row[1:] for row in found}


def assert_exact(world: World) -> None:
    """Assert that the log has what the engine computed for each request."""
    told = {name: (prompt, completion) for name, (_, prompt, completion, _) in rows(world).items()}
    assert told == world.server.finished


def limited(world: World, **limits: float) -> str:
    return world.key(limits=limits)


async def test_whole_answers_and_streams_are_counted_alike(world: World):
    bodies = {
        "/v1/completions": TURN,
        "/v1/chat/completions": {**CHAT, "max_completion_tokens": 8},
        "/v1/responses": {"model": "acme-sums", "input": "one two", "max_output_tokens": 8},
        "/v1/messages": {**CHAT, "max_tokens": 8},
    }
    async with world.client(world.key()) as client:
        for path, body in bodies.items():
            for more in ({}, {"stream": True}):
                assert (await client.post(path, json=body | more)).status_code == 200
    assert len(rows(world)) == 8
    assert all(state == "settled" for state, *_ in rows(world).values())
    assert_exact(world)
    # The ledger's observations have a stream's tokens too.
    assert all(row["completion_tokens"] == 8 for _, row in world.events.rows)


async def test_the_piece_with_usage_is_for_those_who_ask(world: World):
    async with world.client(world.key()) as client:
        for options, extra in (
            (None, False),
            ({"include_usage": False}, False),
            ({"include_usage": True}, True),
        ):
            body = TURN | {"stream": True} | ({"stream_options": options} if options else {})
            text = (await client.post("/v1/completions", json=body)).text
            events = [line.removeprefix("data: ") for line in text.splitlines() if line]
            assert events[-1] == "[DONE]"
            assert ("usage" in json.loads(events[-2])) == extra
            # Eight words and their end.
            assert len(events) == 10 + extra
    # What was sent; the end of the stream, an empty piece, is none.
    assert [row["pieces"] for _, row in world.events.rows] == [10, 10, 11]
    assert_exact(world)


class Served:
    """A world behind uvicorn, so that clients can leave."""

    def __init__(self, world: World):
        self.port = free_port()
        config = uvicorn.Config(world.app, port=self.port, lifespan="off", log_level="error")
        self.server = uvicorn.Server(config)

    async def __aenter__(self) -> str:
        self.task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{self.port}"

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self.task


async def leave_at_work(world: World, asking: Coroutine[Any, Any, httpx.Response]) -> None:
    """Ask, and hang up once some of a whole answer is computed, and not after some time."""
    asked = asyncio.create_task(asking)
    await settle(lambda: any(computed > 5 for _, computed in world.server.under_way.values()))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


# What a client writes into its tools is no bill, though vLLM repeats it in the first event of a response.
BILLS = ({"input_tokens": -(10**9), "output_tokens": 0}, {"input_tokens": "many", "output_tokens": 1})


@pytest.mark.parametrize("path", APIS)
async def test_a_client_that_leaves_pays_for_what_was_computed(world: World, path: str):
    world.server.step_s = 0.005
    headers = {"authorization": f"Bearer {world.key(limits={'concurrency': 1})}"}
    length = {"max_output_tokens": 200} if path == RESPONSES else {"max_tokens": 200}

    async def settled(count: int) -> None:
        async with asyncio.timeout(60):
            while len(world.server.finished) < count or world.state.meter.under_way:
                await asyncio.sleep(0.01)

    async with Served(world) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        for number, (words, bill) in enumerate(zip((1, 30), BILLS, strict=True)):
            tools = [{"type": "function", "name": "f", "parameters": {"usage": bill}}]
            body = body_of(path, "acme-sums", stream=True, **length)
            body |= {} if path == COMPLETIONS else {"tools": tools}
            async with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                said = 0
                async for line in response.aiter_lines():
                    said += '"x"' in line
                    if said == words:
                        break
            await settled(number + 1)
        await leave_at_work(world, client.post(path, json=body_of(path, "acme-sums", **length)))
        await settled(3)
    world.usage.write()
    assert len(rows(world)) == 3
    for name, (state, prompt, completion, reserved) in rows(world).items():
        assert (state, prompt) == ("settled", world.server.finished[name][0])
        # The engine notices within a step.
        assert completion <= world.server.finished[name][1] <= completion + 2
        assert 0 < completion < 200 < reserved


def ended(call: Call, used: tuple[int, int]) -> Call:
    call.answer.status, call.answer.used = 200, used
    return call


async def test_no_more_than_the_reservation_and_nothing_negative_is_billed(world: World):
    call = world.call(world.key(), "a")
    await world.state.meter.open(call)
    reserved = call.bill.entry.request.reserved
    world.state.meter.settle(ended(call, (reserved - 30, 10**9)))
    assert rows(world)["a"] == ("settled", reserved - 30, 30, reserved)
    call = world.call(world.key(), "b")
    await world.state.meter.open(call)
    world.state.meter.settle(ended(call, (-1, 5)))
    assert rows(world)["b"] == ("settled", 0, 5, reserved)
    # A row that the database refuses would keep all others from it.
    for used in ((-1, 1), (1, -1), (reserved, 1)):
        with pytest.raises(ValueError, match=str(reserved)):
            world.usage.settle(world.usage.admit(call.bill.entry.request), 200, used)


async def test_an_engine_that_cannot_say_counts_as_reserved(world: World):
    world.server.step_s = 0.005
    world.state.counted = lambda request_id: None
    headers = {"authorization": f"Bearer {world.key()}"}
    async with Served(world) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        await leave_at_work(world, client.post("/v1/completions", json=TURN | {"max_tokens": 200}))
        async with asyncio.timeout(60):
            while not world.server.finished or any(row[0] == "admitted" for row in rows(world).values()):
                await asyncio.sleep(0.01)
    assert [row[0] for row in rows(world).values()] == ["unknown"]


async def test_what_the_engine_refuses_costs_nothing(world: World):
    world.server.fault = 400, {"error": {"message": "Too long.", "code": 400}}
    async with world.client(limited(world, tokens_per_day=300)) as client:
        for _ in range(10):
            assert (await client.post("/v1/completions", json=TURN)).status_code == 400
        assert (await client.post("/v1/completions", json=TURN | {"model": "acme-none"})).status_code == 404
    assert {row[:3] for row in rows(world).values()} == {("settled", 0, 0)}


async def test_a_reservation_covers_prompt_and_every_completion(world: World):
    async with world.client(world.key()) as client:
        await client.post("/v1/completions", json=TURN | {"n": 3, "max_tokens": 40})
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/completions", json=TURN | {"prompt": ["a", "b"], "max_tokens": 1000})
    one, chat, two = (row[3] for row in rows(world).values())
    assert 3 * 40 + 12 < one < 3 * 40 + 100
    assert chat == 256 + 256
    # No template is before a plain prompt.
    assert 2 * 256 < two < 2 * 256 + 100


async def test_what_a_limit_never_admits_is_a_400_that_names_what_it_does(world: World):
    """On a context of 256: no wait helps, so nobody is told to try again."""
    async with world.client(limited(world, tokens_per_minute=420)) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 250})
        assert refused.status_code == 400
        said = refused.json()["error"]
        assert (said["code"], said["param"]) == ("limit_too_low", "max_tokens")
        most = int(said["message"].partition("at most ")[2].split()[0])
        assert (
            await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": most})
        ).status_code == 200
        world.usage.write()
        assert max(row[3] for row in rows(world).values()) <= 420
    async with world.client(limited(world, tokens_per_day=100)) as client:
        too_long = await client.post("/v1/completions", json=TURN | {"prompt": "x" * 200})
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "limit_too_low")


@pytest.mark.parametrize("path", [path for path in APIS if path not in (COMPLETIONS, MESSAGES)])
async def test_a_completion_of_no_length_has_the_one_that_the_limit_admits(world: World, path: str):
    world.state.meter = Meter(world.usage, 4, template_tokens=20)
    body = {name: value for name, value in body_of(path, "acme-sums").items() if "tokens" not in name}
    async with world.client(limited(world, tokens_per_minute=200)) as client:
        assert (await client.post(path, json=body)).status_code == 200
    _, sent, _ = world.server.seen[-1]
    length = sent["max_output_tokens" if path == RESPONSES else "max_completion_tokens"]
    assert 0 < length < 200
    world.usage.write()
    assert [row[3] for row in rows(world).values()] == [200]


async def test_every_call_counts(world: World):
    calls = {
        "/v1/models": None,
        "/v1/models/acme-sums": None,
        "/v1/feedback": {"request_id": "x", "reward": 1},
        "/v1/prewarm": {"model": "acme-sums"},
        "/tokenize": {"model": "acme-sums", "prompt": "x"},
        "/detokenize": {"model": "acme-sums", "tokens": [1]},
        "/v1/messages/count_tokens": {**CHAT},
    }
    for path, body in calls.items():
        async with world.client(limited(world, requests_per_minute=1)) as client:
            method = "GET" if body is None else "POST"
            statuses = [(await client.request(method, path, json=body)).status_code for _ in range(2)]
        assert (statuses[0] != 429, statuses[1]) == (True, 429), path
    async with world.client(limited(world, concurrency=0)) as client:
        assert (await client.get("/v1/models")).status_code == 429
    assert not world.state.meter.under_way


async def test_tokenizing_takes_tokens_of_the_minute(world: World):
    async with world.client(limited(world, tokens_per_minute=100)) as client:
        body = {"model": "acme-sums", "prompt": "x" * 200}
        found = [(await client.post("/tokenize", json=body)).status_code for _ in range(3)]
        assert found == [200, 429, 429]
        longer = await client.post("/tokenize", json=body | {"prompt": "x" * 1000})
        assert (longer.status_code, longer.json()["error"]["code"]) == (400, "limit_too_low")


async def test_who_rates_an_answer_is_who_got_it_and_once(world: World):
    keys = {name: world.key(name) for name in ("acme", "umbrella")}
    async with world.client(keys["acme"]) as client:
        given = (await client.post("/v1/completions", json=TURN)).json()["id"]
        made_up = f"cmpl-{'0123456789abcdef' * 2}"
        for name, status in ((given, 202), (given, 202), (made_up, 404), ("x", 404), (given[:-1] + "z", 404)):
            said = await client.post("/v1/feedback", json={"request_id": name, "reward": 1})
            assert said.status_code == status, name
    async with world.client(keys["umbrella"]) as client:
        assert (await client.post("/v1/feedback", json={"request_id": given, "reward": 0})).status_code == 404
    assert [row["request_id"] for table, row in world.events.rows if table == "feedback"] == [given]


async def test_a_daily_budget_is_exact_and_says_when_to_return(world: World):
    key = limited(world, tokens_per_day=1000)
    world.server.short = 4
    statuses = []
    async with world.client(key) as client:
        for _ in range(400):
            response = await client.post("/v1/completions", json=TURN)
            statuses.append(response.status_code)
            if response.status_code == 429:
                break
    assert statuses.count(200) > 50
    assert (response.status_code, response.json()["error"]["code"]) == (429, "insufficient_quota")
    assert 1 <= int(response.headers["retry-after"]) <= 86400
    used = sum(prompt + completion for _, prompt, completion, _ in rows(world).values())
    reserved = next(iter(rows(world).values()))[3]
    assert used <= 1000 < used + reserved
    assert_exact(world)


async def test_a_tenants_budget_is_shared_by_its_keys(world: World):
    world.catalog.keys.set_tenant(Tenant("acme", {"tokens_per_month": 250.0}))
    async with world.client(world.key()) as one, world.client(world.key()) as two:
        found = [(await client.post("/v1/completions", json=TURN)).status_code for client in (one, two) * 20]
    assert found[:2] == [200, 200]
    assert found[-2:] == [429, 429]
    async with world.client(world.key("umbrella")) as other:
        assert (
            await other.post("/v1/completions", json=TURN | {"model": "umbrella-sums"})
        ).status_code == 200


async def test_requests_and_tokens_of_a_minute(world: World, monkeypatch: pytest.MonkeyPatch):
    # The minute stands still: a slow machine refills no bucket.
    monkeypatch.setattr("engine.serving.gateway.meter.time", SimpleNamespace(monotonic=lambda: 100.0))
    async with world.client(limited(world, requests_per_minute=3)) as client:
        found = [await client.post("/v1/completions", json=TURN) for _ in range(4)]
    assert [one.status_code for one in found] == [200, 200, 200, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in found[:3]] == ["2", "1", "0"]
    assert found[0].headers["x-ratelimit-limit-requests"] == "3"
    assert found[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 15 <= int(found[3].headers["retry-after"]) <= 20
    async with world.client(limited(world, tokens_per_minute=600)) as client:
        found = [await client.post("/v1/completions", json=TURN) for _ in range(60)]
    # What was reserved and not used came back.
    assert sum(one.status_code == 200 for one in found) > 20
    assert found[-1].status_code == 429


async def test_requests_under_way(world: World):
    world.server.step_s = 0.01
    async with world.client(limited(world, concurrency=2)) as client:
        found = await asyncio.gather(*(client.post("/v1/completions", json=TURN) for _ in range(5)))
        assert sorted(one.status_code for one in found) == [200, 200, 429, 429, 429]
        assert (await client.post("/v1/completions", json=TURN)).status_code == 200


def unsettled() -> float:
    return REGISTRY.get_sample_value("graftwork_usage_unsettled_total") or 0.0


def unwritable(*_: object) -> Any:
    raise sqlite3.OperationalError("database or disk is full")


async def test_a_request_that_cannot_be_recorded_is_not_served(world: World, monkeypatch):
    monkeypatch.setattr(LineFile, "append", Mock(side_effect=OSError("No space left on device")))
    before = unsettled()
    async with world.client(limited(world, tokens_per_day=1000)) as client:
        found = [await client.post("/v1/completions", json=TURN | {"max_tokens": 900}) for _ in range(2)]
    # The second one is not refused for the tokens of the first.
    assert [one.status_code for one in found] == [503, 503]
    assert world.server.seen == []
    # Of which somebody is told.
    assert unsettled() == before + 2


async def test_usage_that_could_not_be_written_is_written_with_the_next_request(world: World, monkeypatch):
    """Also when that one is refused; until it is written, none is served."""
    async with world.client(limited(world, tokens_per_day=1000)) as client:
        first = await client.post("/v1/completions", json=TURN | {"max_tokens": 200})
        with monkeypatch.context() as patched:
            patched.setattr(usage_log, "begin", unwritable)
            world.usage.write()
            second = await client.post("/v1/completions", json=TURN)
            assert (first.status_code, second.status_code) == (200, 503)
        refused = await client.post("/v1/completions", json=TURN | {"n": 8, "max_tokens": 110})
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert [row[0] for row in rows(world).values()] == ["settled"]
    assert_exact(world)


async def test_requests_that_come_or_end_together_are_written_at_once(world: World, monkeypatch):
    begun = Mock(side_effect=usage_log.begin)
    monkeypatch.setattr(usage_log, "begin", begun)
    async with world.client(world.key()) as client:
        asked = [client.post("/v1/completions", json=TURN) for _ in range(20)]
        assert {one.status_code for one in await asyncio.gather(*asked)} == {200}
    assert_exact(world)
    assert 1 <= begun.call_count <= 8


async def test_one_refusal_of_a_turn_leaves_the_others(world: World):
    # Room for one request's reservation: its body, and 8.
    tight, wide = world.client(limited(world, tokens_per_day=100)), world.client(world.key())
    async with tight, wide:
        asked = [one.post("/v1/completions", json=TURN) for one in (tight, wide, tight, wide)]
        found = [one.status_code for one in await asyncio.gather(*asked)]
    assert sorted(found[::2]) == [200, 429]
    assert found[1::2] == [200, 200]
    assert [row[0] for row in rows(world).values()] == ["settled"] * 3
    assert_exact(world)


async def test_a_client_that_leaves_while_a_budget_is_drawn_spends_nothing(world: World, monkeypatch):
    """It waits for other machines' database; nothing of it is recorded yet."""
    budget = Budget("tenant:acme", DAY, 100)
    short = Shortage(budget, "2026-11-28", 8, LimitReached("The tenant 'acme' has 0 tokens left.", 1.0))
    has_come, may_go = threading.Event(), threading.Event()
    monkeypatch.setattr(world.usage, "admit", Mock(side_effect=short))
    monkeypatch.setattr(world.usage.upkeep, "draw", lambda _: has_come.set() or may_go.wait(60))
    opening = asyncio.ensure_future(world.state.meter.open(world.call(world.key(), "0")))
    assert await asyncio.to_thread(has_come.wait, 60)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    may_go.set()
    assert not world.state.meter.under_way
    assert rows(world) == {}


async def test_an_end_is_written_soon_without_another_request(world: World):
    call = world.call(world.key(), "0")
    await world.state.meter.open(call)
    world.state.meter.settle(ended(call, (1, 1)))
    async with asyncio.timeout(60):
        while world.usage_state("0") != "settled":
            await asyncio.sleep(WRITTEN_S)


async def test_an_end_that_could_not_be_written_is_written_without_another_request(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    call = world.call(world.key(), "0")
    await world.state.meter.open(call)
    busy = Mock(side_effect=unwritable)
    monkeypatch.setattr(usage_log, "AGAIN_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(usage_log, "begin", busy)
        world.state.meter.settle(ended(call, (1, 1)))
        async with asyncio.timeout(60):
            while not busy.called:
                await asyncio.sleep(WRITTEN_S)
    async with asyncio.timeout(60):
        while world.usage_state("0") != "settled":
            await asyncio.sleep(0.01)


async def test_scores_and_rollouts_are_apart(world: World):
    async with world.client(world.key(roles=["infer", "score"])) as client:
        for purpose in ("user", "score"):
            await client.post("/v1/completions", json=TURN, headers={"x-graftwork-purpose": purpose})
    from engine.settings.params import Params
    from tasks.usage import as_table, usage_by

    world.usage.write()
    settings = Params.model_validate({"state_dir": world.root, "prices": {"prompt": 1.0, "completion": 2.0}})
    found = usage_by(settings, "policy")
    assert [(row["policy"], row["purpose"], row["requests"]) for row in found] == [
        ("acme-sums", "score", 1), ("acme-sums", "user", 1),
    ]  # fmt: skip
    assert found[0]["price"] == round((3 + 2 * 8) / 1e6, 6)
    assert as_table(found).startswith("policy,purpose,requests,")
    assert usage_by(settings, "tenant", end="2020-01-01") == []
    assert usage_by(settings, "revision", begin="2020-01-01")[0]["revision"] == "a" * 64
    for wrong in ({"by": "colour"}, {"by": "key", "begin": "yesterday"}):
        with pytest.raises(ConfigError):
            usage_by(settings, **wrong)


def test_a_bucket_refills_within_a_minute():
    bucket = TokenBucket(60.0, 0.0, 0.0)
    assert bucket.wait_s(30) == 30
    bucket.refill(15.0)
    assert bucket.left == 15
    bucket.refill(1000.0)
    assert bucket.left == 60


def served_first(weight: float = 1.0, burst: int = 100) -> list[str]:
    """Return the order in which an engine with one place serves a burst of A and then B's steady requests."""
    fair, waiting, order = FairShare(), [], []
    waiting += [(fair.enter("a", 10, 1.0), number, "a") for number in range(burst)]
    for number in range(burst, burst + 40):
        waiting.append((fair.enter("b", 10, weight), number, "b"))
        # The engine serves two in the time of each of B's.
        for _ in range(2):
            first = min(waiting)
            waiting.remove(first)
            fair.leave(first[0])
            order.append(first[2])
    return order


def test_a_burst_waits_behind_itself_and_not_in_front_of_others():
    order = served_first()
    # B sends one request for two places, so that none of its own ever waits behind the burst.
    assert order.count("b") == 40
    assert all("b" in order[at : at + 4] for at in range(0, len(order) - 4, 2))


def test_a_tenant_that_was_idle_saves_nothing_up():
    fair = FairShare()
    held = [fair.enter("a", 10, 1.0) for _ in range(10)]
    for tag in held[:5]:
        fair.leave(tag)
    assert fair.enter("b", 10, 1.0) == held[5]


def test_a_weight_of_two_gets_twice_as_much():
    fair = FairShare()
    heavy = [fair.enter("a", 10, 2.0) for _ in range(10)]
    light = [fair.enter("b", 10, 1.0) for _ in range(10)]
    assert heavy[-1] == light[-1] / 2


def test_tags_begin_anew_when_nobody_waits():
    fair = FairShare()
    for _ in range(1000):
        fair.leave(fair.enter("a", 1000, 1.0))
    assert fair.enter("a", 10, 1.0) == 0
