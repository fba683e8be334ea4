"""The gateway in front of a fake server: who may ask, what is passed on, what is observed."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
from prometheus_client import REGISTRY

from engine.catalog.catalog import Catalog
from engine.errors import DamagedBytes
from engine.serving.gateway.call import Metering
from engine.serving.gateway.gateway import Gateway
from engine.serving.gateway.holding import unless_left
from engine.serving.gateway.routing import Router
from tests.helpers.adapters_cold import settle
from tests.helpers.api_answers import APIS, CHAT, COMPLETIONS, MESSAGES, body_of
from tests.helpers.gateway_world import CANARY, CHAMPION, make_world, unit_of, warm


@pytest.fixture
def world(tmp_path):
    world = make_world(tmp_path)
    yield world
    world.usage.close()


async def test_the_route_is_followed_and_observed(world):
    await warm(world, CANARY)
    before = time.time()
    async with world.client() as client:
        responses = [
            await client.post("/v1/completions", json={"model": "sums", "prompt": "1+1", "user": f"u{i}"})
            for i in range(40)
        ]
    models = [body["model"] for _, body, _ in world.server.seen]
    assert set(models) == {f"sums@{CHAMPION[:12]}", f"sums@{CANARY[:12]}"}
    assert [response.headers["x-graftwork-revision"] for response in responses] == models
    rows = [fields for table, fields in world.events.rows if table == "observations"]
    assert [row["id"] for row in rows] == [response.json()["id"] for response in responses]
    arms = {"champion": CHAMPION, "canary": CANARY}
    assert all(row["digest"] == arms[row["arm"]] and row["status"] == 200 for row in rows)
    assert all(before <= row["at"] <= time.time() and row["completion_tokens"] == 2 for row in rows)
    # The ledger never holds the user's own name.
    assert len({row["unit"] for row in rows}) == 40
    assert not any(row["unit"] == "u3" for row in rows)


async def test_a_gateway_without_limits_usage_and_suggestions_serves_all_the_same(world):
    """What is optional is handed in: without it requests, texts and models are answered, cold and warm."""
    world.state.meter, world.state.router = Metering(), Router(world.catalog, "tiny", "base")
    async with world.client() as client:
        for _ in range(2):
            response = await client.post(
                "/v1/completions", json={"model": "sums", "prompt": "1", "user": "u"}
            )
            assert response.status_code == 200
            assert not any(name.startswith("x-ratelimit") for name in response.headers)
        tokens = await client.post("/tokenize", json={"model": "sums", "prompt": "1"})
        assert tokens.status_code == 200
        assert (await client.post("/v1/completions", json={"model": "none"})).status_code == 404
    assert [fields["status"] for table, fields in world.events.rows if table == "observations"] == [200, 200]
    with closing(sqlite3.connect(world.usage.path)) as log:
        assert log.execute("SELECT count(*) FROM requests").fetchone() == (0,)


async def test_the_session_header_is_a_unit_and_nobody_is_none(world):
    async with world.client() as client:
        await client.post("/v1/completions", json={"model": "sums"}, headers={"x-session-id": "s1"})
        await client.post("/v1/completions", json={"model": "sums", "user": "s1"})
        await client.post("/v1/completions", json={"model": "sums"})
    units = [fields["unit"] for _, fields in world.events.rows]
    assert units[0] == units[1] is not None
    assert units[2] is None


@pytest.mark.parametrize(
    ("path", "named"),
    [
        *[(path, {"user": "u1"}) for path in APIS if path != MESSAGES],
        *[(path, {"safety_identifier": "u1"}) for path in APIS],
        (MESSAGES, {"metadata": {"user_id": "u1", "more": 7}}),
        # `user` first.
        (CHAT, {"user": "u1", "safety_identifier": "u2"}),
    ],
)
async def test_the_end_user_is_named_in_the_words_of_each_api(world, path, named):
    async with world.client("user") as client:
        await client.post(COMPLETIONS, json=body_of(COMPLETIONS, "sums", user="u1"))
        await client.post(path, json=body_of(path, "sums") | named)
    first, second = (fields for _, fields in world.events.rows)
    assert first["unit"] == second["unit"] is not None
    assert first["digest"] == second["digest"]
    assert world.server.seen[-1][1].keys().isdisjoint({"metadata", "safety_identifier"})


@pytest.mark.parametrize("named", [{"safety_identifier": 7}, {"metadata": {"user_id": "u" * 600}}])
async def test_a_name_of_the_end_user_is_a_short_text(world, named):
    async with world.client("user") as client:
        answer = await client.post(MESSAGES, json=body_of(MESSAGES, "sums") | named)
    assert (answer.status_code, "512" in answer.text) == (400, True)


async def test_the_segment_is_observed(world):
    async with world.client() as client:
        await client.post("/v1/completions", json={"model": "sums"}, headers={"x-graftwork-segment": "de-CH"})
        await client.post("/v1/completions", json={"model": "sums"})
    assert [fields["segment"] for _, fields in world.events.rows] == ["de-CH", None]


@pytest.mark.parametrize(
    ("scope", "path", "body", "headers", "status", "sentence"),
    [
        (None, "/v1/completions", {"model": "sums"}, {}, 401, "API key"),
        ("user", "/v1/completions", {"model": "nobody"}, {}, 404, "Unknown model 'nobody'"),
        ("user", "/v1/completions", {"model": "sums@cccc"}, {}, 403, "the role 'pin'"),
        ("pin", "/v1/completions", {"model": "sums@cccc"}, {}, 404, "no revision 'cccc'"),
        ("user", "/v1/completions", [1], {}, 400, "JSON object"),
        ("user", "/v1/completions", {"model": "sums"}, {"x-graftwork-purpose": "score"}, 403, "role 'score'"),
        ("user", "/graftwork/samples", {"model": "sums"}, {}, 403, "role 'score' or 'train'"),
        ("score", "/v1/completions", {"model": "sums"}, {"x-graftwork-purpose": "fun"}, 400, "not 'fun'"),
        ("user", "/v1/completions", {"model": "sums"}, {"x-graftwork-segment": "a b"}, 400, "not 'a b'"),
        ("admin", "/v1/load_lora_adapter", {}, {}, 404, "not served"),
    ],
)
async def test_refusals_say_why(world, scope, path, body, headers, status, sentence):
    async with world.client(scope) as client:
        response = await client.post(path, json=body, headers=headers)
    assert response.status_code == status
    assert sentence in response.json()["error"]["message"]
    assert world.server.seen == []


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/completions", "/health"])
async def test_a_websocket_is_refused_with_or_without_a_key(world, path):
    """vLLM has routes of this kind, which generate."""
    keys = [(b"authorization", f"Bearer {world.keys['admin']}".encode())]
    for headers in ([], keys):
        sent = []

        async def send(message, sent=sent):
            sent.append(message)

        async def receive():
            return {"type": "websocket.connect"}

        await world.call({"type": "websocket", "path": path, "headers": headers}, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]
    assert world.server.seen == []


@pytest.mark.parametrize("method", ["DELETE", "GET", "PUT", "PATCH", "HEAD"])
async def test_a_generating_path_takes_post_alone(world, method):
    async with world.client("admin") as client:
        response = await client.request(method, "/v1/completions", json=PINNED)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert world.engine.prepared == []
    assert world.server.seen == []


@pytest.mark.parametrize(
    ("scope", "method", "path", "status"),
    [
        (None, "GET", "/health", 200),
        (None, "POST", "/ping", 200),
        (None, "POST", "/health", 401),
        ("user", "POST", "/health", 405),
        ("user", "GET", "/v1/models", 200),
        ("user", "DELETE", "/v1/models", 405),
        ("user", "GET", "/v1/feedback", 405),
        ("admin", "GET", "/v1/unload_lora_adapter", 404),
    ],
)
async def test_a_path_takes_its_own_methods_alone(world, scope, method, path, status):
    async with world.client(scope) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert len(world.server.seen) == (status == 200)


TOKENS = {"/tokenize": {"prompt": "1+1"}, "/detokenize": {"tokens": [1, 2]}}


@pytest.mark.parametrize("path", TOKENS)
async def test_every_model_has_its_bases_tokens_and_needs_no_load(world, path):
    async with world.client() as client:
        for model in ("sums", f"sums@{CANARY[:12]}", "tiny", None):
            body = TOKENS[path] | ({"model": model} if model else {})
            assert (await client.post(path, json=body)).status_code == 200
        unknown = await client.post(path, json={"model": "nobody"} | TOKENS[path])
        refused = await client.get(path)
    assert [(seen, body.get("model")) for seen, body, _ in world.server.seen] == [
        (path, "tiny"), (path, "tiny"), (path, "tiny"), (path, None),
    ]  # fmt: skip
    assert (unknown.status_code, refused.status_code) == (404, 405)
    assert "Unknown model 'nobody'" in unknown.json()["error"]["message"]
    assert world.engine.prepared == []


async def test_samples_are_rollouts_without_a_header(world):
    async with world.client("score") as client:
        await client.post("/graftwork/samples", json=PINNED)
        await client.post("/graftwork/samples", json=PINNED, headers={"x-graftwork-purpose": "probe"})
        await client.post("/v1/completions", json=PINNED)
    assert [row["purpose"] for _, row in world.events.rows] == ["rollout", "probe", "user"]
    assert world.loads == ["background"]


async def test_the_servers_own_start_and_end_pass(world):
    seen = []

    async def server(scope, receive, send):
        seen.append(scope["type"])

    await Gateway(server)({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]


async def test_a_tombstone_answers_410_but_not_to_the_scorer(world):
    world.catalog.tombstones.add("sums", CANARY, "Reward fell.", "controller")
    pinned = {"model": f"sums@{CANARY[:12]}"}
    async with world.client("score") as client:
        refused = await client.post("/v1/completions", json=pinned)
        scored = await client.post("/v1/completions", json=pinned, headers={"x-graftwork-purpose": "score"})
        followed = await client.post("/v1/completions", json={"model": "sums", "user": "u1"})
    assert refused.status_code == 410
    assert "Reward fell." in refused.json()["error"]["message"]
    assert scored.status_code == 200
    assert followed.headers["x-graftwork-revision"] == f"sums@{CHAMPION[:12]}"
    assert world.events.rows[0][1]["purpose"] == "score"


async def test_a_revoked_key_is_refused_at_once(world):
    async with world.client() as client:
        assert (await client.post("/v1/completions", json={"model": "tiny"})).status_code == 200
        world.catalog.keys.revoke(world.keys["pin"])
        assert (await client.post("/v1/completions", json={"model": "tiny"})).status_code == 401


async def test_the_base_answers_under_its_own_name(world):
    async with world.client() as client:
        response = await client.post("/v1/completions", json={"model": "tiny"})
    assert response.headers["x-graftwork-revision"] == "base"
    assert world.server.seen[0][1]["model"] == "tiny"
    assert world.events.rows[0][1]["arm"] == "base"


async def test_health_needs_no_key_and_a_starting_engine_says_so(world):
    async with world.client(None) as client:
        assert (await client.get("/health")).status_code == 200
    del world.app.state.graftwork
    async with world.client() as client:
        response = await client.post("/v1/completions", json={"model": "tiny"})
    assert response.status_code == 503
    assert "starting" in response.json()["error"]["message"]


PINNED = {"model": f"sums@{CHAMPION[:12]}"}


async def test_a_full_queue_answers_429_and_when_to_come_again(world):
    world.engine.may_end.clear()
    digests = [f"{number:x}" * 64 for number in range(6)]
    row = world.catalog.revisions.get("sums", CHAMPION)
    for digest in digests:
        world.catalog.revisions.add_many([replace(row, digest=digest)])
    async with world.client() as client:
        asked = [
            asyncio.create_task(client.post("/v1/completions", json={"model": f"sums@{d[:12]}"}))
            for d in digests
        ]
        # No load ends, and makes room, before the last of them has asked.
        await settle(lambda: sum(task.done() for task in asked) == 2)
        world.engine.may_end.set()
        responses = await asyncio.gather(*asked)
    codes = sorted(response.status_code for response in responses)
    assert codes == [200] * 4 + [429] * 2
    full = next(response for response in responses if response.status_code == 429)
    assert int(full.headers["retry-after"]) >= 1
    assert "again later" in full.json()["error"]["message"]


async def test_a_client_that_leaves_ends_its_load(world):
    world.engine.seconds = 600
    messages = [{"type": "http.request", "body": json.dumps(PINNED).encode(), "more_body": False}]
    headers = [(b"authorization", f"Bearer {world.keys['pin']}".encode())]
    scope = {"type": "http", "path": "/v1/completions", "headers": headers, "method": "POST"}

    async def receive():
        if messages:
            return messages.pop()
        while not world.engine.prepared:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message): ...

    # A load that nobody ends would take a minute at the most.
    await asyncio.wait_for(world.call(scope, receive, send), 30)
    assert len(world.state.residency.queue) == 0
    assert world.server.seen == []
    assert world.events.rows[-1][1]["status"] == 499


async def test_what_ended_in_the_turn_of_the_cancellation_is_given_back(world):
    revision, residency = world.catalog.revisions.get("sums", CHAMPION), world.state.residency

    async def work():
        name = await residency.hold(revision)
        # After the end of this coroutine, and before its waiter runs.
        asyncio.get_running_loop().call_soon(asked.cancel)
        return name

    asked = asyncio.create_task(unless_left(asyncio.Event().wait, work(), residency.release))
    with pytest.raises(asyncio.CancelledError):
        await asked
    (resident,) = residency.residents.values()
    assert resident.users == 0


async def test_a_damaged_adapter_is_a_422_until_its_bytes_come_again(world):
    world.engine.faults = [DamagedBytes("its bytes are damaged; export the revision again.")]
    async with world.client() as client:
        first = await client.post("/v1/completions", json=PINNED)
        second = await client.post("/v1/completions", json=PINNED)
        other = await client.post("/v1/completions", json={"model": f"sums@{CANARY[:12]}"})
        row = world.catalog.revisions.get("sums", CHAMPION)
        world.catalog.places.replace(replace(row, segment="whole.seg"))
        repaired = await client.post("/v1/completions", json=PINNED)
    assert [first.status_code, second.status_code, other.status_code] == [422, 422, 200]
    assert "damaged" in first.json()["error"]["message"]
    assert "quarantine" in second.json()["error"]["message"]
    assert repaired.status_code == 200


def add_revision(world, digest: str) -> dict[str, str]:
    """Publish a revision that no route names; return a body that pins it."""
    row = world.catalog.revisions.get("sums", CHAMPION)
    world.catalog.revisions.add_many([replace(row, digest=digest)])
    return {"model": f"sums@{digest[:12]}"}


async def changed_while_loading(world, body, change, scope: str = "pin", **headers: str) -> httpx.Response:
    """Send a request for a cold adapter, and `change` something while its load runs."""
    world.engine.seconds = 0.02
    world.engine.may_end.clear()
    async with world.client(scope) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await settle(lambda: world.engine.prepared)
        assert world.server.seen == []
        change(world.catalog)
        world.engine.may_end.set()
        response = await asked
    assert all(resident.users == 0 for resident in world.state.residency.residents.values())
    return response


def promote(catalog: Catalog) -> None:
    route = catalog.routes.get("sums")
    catalog.routes.update(replace(route, champion=CANARY, canary=None, weight=0.0), route.version)


def withdraw_champion(catalog: Catalog) -> None:
    catalog.tombstones.add("sums", CHAMPION, "Reward fell.", "me")
    promote(catalog)


UNROUTED = "c" * 64


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        (lambda catalog: catalog.tombstones.add("sums", UNROUTED, "Reward fell.", "me"), 410, "rolled back"),
        (lambda catalog: catalog.lifecycle.retire("sums", UNROUTED, "ann", "Old."), 410, "was retired"),
        (lambda catalog: catalog.purges.run("sums", "ann", 1.0), 410, "purged by ann"),
        (lambda catalog: catalog.quarantine.add("sums", UNROUTED, "It is damaged."), 422, "in quarantine"),
    ],
    ids=["tombstone", "retirement", "purge", "quarantine"],
)
async def test_a_revision_that_is_withdrawn_during_its_load_answers_nothing(world, change, status, sentence):
    response = await changed_while_loading(world, add_revision(world, UNROUTED), change)
    assert response.status_code == status
    assert sentence in response.json()["error"]["message"]
    assert world.server.seen == []
    assert world.events.rows[-1][1]["status"] == status


@pytest.mark.parametrize("change", [promote, withdraw_champion])
async def test_a_request_follows_a_route_that_changes_during_its_load(world, change):
    began = time.time()
    body = {"model": "sums", "user": unit_of(world, "champion")}
    response = await changed_while_loading(world, body, change)
    assert response.status_code == 200
    assert response.headers["x-graftwork-revision"] == f"sums@{CANARY[:12]}"
    assert [seen["model"] for _, seen, _ in world.server.seen] == [f"sums@{CANARY[:12]}"]
    row = world.events.rows[-1][1]
    assert (row["digest"], row["arm"]) == (CANARY, "champion")
    assert began + world.engine.seconds < row["at"] < time.time()


async def test_a_champion_that_is_rolled_back_during_its_load_leaves_the_base(world):
    body = {"model": "sums", "user": unit_of(world, "champion")}
    response = await changed_while_loading(
        world, body, lambda catalog: catalog.tombstones.add("sums", CHAMPION, "It was bad.", "me")
    )
    assert response.headers["x-graftwork-revision"] == "base"
    assert world.server.seen[0][1]["model"] == "tiny"


async def test_the_scorer_may_wait_for_a_revision_with_a_tombstone(world):
    pinned, purpose = add_revision(world, UNROUTED), {"x-graftwork-purpose": "score"}
    response = await changed_while_loading(
        world, pinned, lambda catalog: catalog.tombstones.add("sums", UNROUTED, "It fell.", "me"), "score",
        **purpose,
    )  # fmt: skip
    assert response.status_code == 200
    assert response.headers["x-graftwork-revision"] == pinned["model"]


async def test_no_request_is_admitted_by_a_look_after_the_tombstone(world):
    """Warm and cold requests without a pause, with a rollback in the middle and no second left out."""
    route = world.catalog.routes.get("sums")
    world.catalog.routes.update(replace(route, weight=0.999), route.version)
    world.engine.seconds = 0.02
    bad, pinned = f"sums@{CANARY[:12]}", [add_revision(world, f"{i:x}" * 64) for i in range(1, 3)]
    # With the champion they fill the queue of cold loads.
    bodies = [{"model": "sums"}, {"model": bad}, *pinned]
    async with world.client() as client:
        asked = []
        for number in range(120):
            asked.append(asyncio.create_task(client.post("/v1/completions", json=bodies[number % 4])))
            await asyncio.sleep(0.001)
            if number == 70:
                # Its load starts again, so that requests wait for it when the tombstone comes.
                world.state.residency.evict(bad)
            if number == 75:
                before = len(world.server.seen)
                world.catalog.tombstones.add("sums", CANARY, "Reward fell.", "me")
                committed = time.time()
        responses = await asyncio.gather(*asked)
    served = [body["model"] for _, body, _ in world.server.seen]
    assert bad in served[:before]
    assert served[before:].count(bad) == 0
    assert len(served) - before > 20
    rows = [row for _, row in world.events.rows if row["digest"] == CANARY and row["status"] == 200]
    assert sum(row["at"] > committed for row in rows) == 0
    assert {response.status_code for response in responses} == {200, 410}


async def test_a_full_spool_disk_changes_no_answer(world):
    """Refusals of the gateway, an answer of the engine, and an error of the engine."""
    world.events.is_full = True
    lost = REGISTRY.get_sample_value("graftwork_observations_lost_total")
    world.engine.faults = [DamagedBytes("its bytes are damaged; export the revision again.")]
    async with world.client() as client:
        refused = await client.post("/v1/completions", json=PINNED)
        answered = await client.post("/v1/completions", json={"model": "tiny"})
        world.server.status = 400
        failed = await client.post("/v1/completions", json={"model": "tiny"})
    assert [refused.status_code, answered.status_code, failed.status_code] == [422, 200, 400]
    assert "damaged" in refused.json()["error"]["message"]
    assert answered.json()["id"].startswith("cmpl-")
    assert REGISTRY.get_sample_value("graftwork_observations_lost_total") == lost + 3


async def test_names_that_name_nothing_or_too_much_are_told_the_near_ones(world):
    row = world.catalog.revisions.get("sums", CANARY)
    world.catalog.revisions.add_many([replace(row, digest="b" * 30 + "c" * 34)])
    async with world.client() as client:
        missing = await client.post("/v1/completions", json={"model": "sums@aab"})
        several = await client.post("/v1/completions", json={"model": "sums@bb"})
        unknown = await client.post("/v1/completions", json={"model": "sum"})
    assert (missing.status_code, several.status_code, unknown.status_code) == (404, 409, 404)
    assert missing.json()["error"]["nearest"][0] == f"sums@{CHAMPION[:12]}"
    assert len(several.json()["error"]["candidates"]) == 2
    assert "sums" in unknown.json()["error"]["nearest"]


async def test_scores_wait_in_the_background(world):
    async with world.client("score") as client:
        for purpose, model in (("score", CHAMPION), ("user", CANARY)):
            headers = {"x-graftwork-purpose": purpose}
            body = {"model": f"sums@{model[:12]}"}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert world.loads == ["background", "interactive"]
