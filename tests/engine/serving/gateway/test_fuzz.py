"""Any request at all: no 500, an error in the API's form, nothing left open, memory flat."""

import asyncio
import gc
import json
from typing import Any

import pytest
from gateways import World, open_world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.serving.gateway.route_table import ROUTES

CASES, MANY = 1_500, 50_000
CHECKS = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
UNKNOWN = ["/v1/realtime", "/v1/models/acme-sums", "/", "//v1/completions", "/v1/x"]
PATHS = [route.path for route in ROUTES] + UNKNOWN
METHODS = ["GET", "POST", "PUT", "OPTIONS", "HEAD", "DELETE", "X"]
# What vLLM knows and the table does not, beside everything that the table does.
NAMES = sorted(
    {name for route in ROUTES for name in route.fields or ()}
    | {"cache_salt", "priority", "vllm_xargs", "kv_transfer_params", "request_id", "prompt_embeds", "best_of"}
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, width=32)
    | st.text(max_size=20) | st.sampled_from(["acme-sums", "umbrella-sums", "acme-sums@" + "a" * 12, "tiny"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
GOOD = {"model": "acme-sums", "prompt": "x", "max_tokens": 2}
BODIES = (
    FIELDS.map(lambda fields: json.dumps(GOOD | fields).encode())
    | FIELDS.map(lambda fields: json.dumps(fields).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=64)
)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["x-graftwork-purpose", "x-session-id", "x-api-key", "x-vllm-priority", "origin", "content-length",
         "access-control-request-method", "x-request-id", "transfer-encoding"]
    ),
    st.sampled_from(["user", "score", "", "-1", "POST", "https://x", "\xff"]) | st.text("abc:/é", max_size=9),
    max_size=3,
)  # fmt: skip


async def call(
    world: World, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    """Call the gateway without a client that would tidy the request up."""
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b"", "state": {}}
    await world.app(scope, receive, send)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    opened = open_world(tmp_path_factory.mktemp("fuzz"))
    opened.server.short = 4
    yield opened
    opened.close()


def fuzz(world: World, cases: settings) -> None:
    keys = {name: world.key(roles=[name, "infer"]) for name in ("infer", "pin", "score", "train", "feedback")}
    keys |= {"admin": world.catalog.keys.create("root", "admin"), "none": "", "bad": "gw-" + "0" * 40}
    loop = asyncio.new_event_loop()

    @given(
        st.sampled_from(sorted(keys)), st.sampled_from(METHODS),
        st.sampled_from(PATHS) | st.text("/v1abc%.é\0", max_size=20), HEADERS, BODIES,
    )  # fmt: skip
    @cases
    def one(who: str, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        # Half of all cases are what the gateway looks into most.
        is_deep = len(body) % 2 == 0
        if is_deep and who != "none":
            method, path = "POST", ROUTES[len(body) % len(ROUTES)].path
        given_headers = {"authorization": f"Bearer {keys[who]}"} | headers if keys[who] else headers
        status, told = loop.run_until_complete(call(world, method, path, given_headers, body))
        assert status < 500
        if status >= 400:
            fault = json.loads(told)["error"] if told else {"message": "", "type": ""}
            assert isinstance(fault["message"], str)
            assert isinstance(fault["type"], str)
        world.server.seen.clear()
        world.server.finished.clear()
        world.events.rows.clear()

    one()
    loop.close()


def test_any_request_is_answered(world: World) -> None:
    fuzz(world, CHECKS)
    status, _ = asyncio.run(
        call(
            world,
            "POST",
            "/v1/completions",
            {"authorization": f"Bearer {world.key()}"},
            json.dumps(GOOD).encode(),
        )
    )
    assert status == 200
    # Nothing is under way any more.
    assert not world.state.meter._under_way
    assert not any(world.state.meter._loading.values())
    rows = world.usage._connection.execute(
        "SELECT count(*) FROM requests WHERE state = 'admitted'"
    ).fetchone()
    assert rows == (0,)
    assert all(resident.users == 0 for resident in world.state.residency.residents.values())


@pytest.mark.slow
def test_fifty_thousand_requests_leave_memory_flat(world: World) -> None:
    import psutil

    fuzz(world, CHECKS)
    gc.collect()
    before = psutil.Process().memory_info().rss
    fuzz(world, settings(CHECKS, max_examples=MANY))
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 100 << 20
