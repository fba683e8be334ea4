"""Any request at all: no 500, an error in the API's form, nothing left open, memory flat."""

import asyncio
import gc
import json
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.serving.gateway.route_table import ROUTES
from tests.helpers.gateways import World, open_world

CASES, WARM, MANY = 1_500, 5_000, 50_000
# Not fewer than an exploring run asks for.
CHECKS = settings(max_examples=max(CASES, settings().max_examples), suppress_health_check=list(HealthCheck))
UNKNOWN = ["/v1/realtime", "/v1/models/acme-sums", "/", "//v1/completions", "/v1/x"]
PATHS = [route.path for route in ROUTES] + UNKNOWN
METHODS = ["GET", "POST", "PUT", "OPTIONS", "HEAD", "DELETE", "X"]
# What vLLM knows and the table does not, beside everything that the table does.
NAMES = sorted(
    {name for route in ROUTES for name in route.fields or ()}
    | {"cache_salt", "priority", "vllm_xargs", "kv_transfer_params", "request_id", "prompt_embeds", "best_of"}
)
MODELS = ["acme-sums", "umbrella-sums", "acme-sums@" + "a" * 12, "tiny"]
LEAVES = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, width=32)
    | st.text(max_size=20) | st.sampled_from(MODELS)
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
HEADER_NAMES = [
    "x-graftwork-purpose", "x-session-id", "x-api-key", "x-vllm-priority", "origin", "content-length",
    "access-control-request-method", "x-request-id", "transfer-encoding",
]  # fmt: skip
HEADER_VALUES = ["user", "score", "", "-1", "POST", "https://x", "\xff"]
HEADERS = st.dictionaries(
    st.sampled_from(HEADER_NAMES), st.sampled_from(HEADER_VALUES) | st.text("abc:/é", max_size=9), max_size=3
)


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


class Fuzzer:
    """Callers of every kind; each case is one call and what must be true of its answer."""

    def __init__(self, world: World):
        self.world, self.loop = world, asyncio.new_event_loop()
        roles = ("infer", "pin", "score", "train", "feedback")
        self.keys = {name: world.key(roles=[name, "infer"]) for name in roles}
        self.keys |= {
            "admin": world.catalog.keys.create("root", "admin"),
            "none": "",
            "bad": "gw-" + "0" * 40,
        }

    def close(self) -> None:
        self.loop.close()

    def run(self, who: str, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        # Half of all cases are what the gateway looks into most.
        if len(body) % 2 == 0 and who != "none":
            method, path = "POST", ROUTES[len(body) % len(ROUTES)].path
        key = self.keys[who]
        given_headers = {"authorization": f"Bearer {key}"} | headers if key else headers
        status, told = self.loop.run_until_complete(call(self.world, method, path, given_headers, body))
        if (path, status) == ("/graftwork/ready", 503):
            # It drains: an admin's request of an earlier case.
            assert json.loads(told)["reason"] == "draining"
            return
        assert status < 500
        if status >= 400:
            fault = json.loads(told)["error"] if told else {"message": "", "type": ""}
            assert isinstance(fault["message"], str)
            assert isinstance(fault["type"], str)
        self.world.server.seen.clear()
        self.world.server.finished.clear()
        self.world.events.rows.clear()


def value(rng: random.Random, depth: int = 2) -> Any:
    """Return a value as `VALUES` has them, without what hypothesis keeps of each case."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {text(rng, 8): value(rng, depth - 1) for _ in range(rng.randrange(5))}
    leaves = (None, rng.random() < 0.5, rng.randint(-(1 << 63), (1 << 63) - 1), rng.gauss(0, 1e3))
    return [*leaves, text(rng, 20), rng.choice(MODELS)][kind]


def text(rng: random.Random, most: int) -> str:
    codes = (rng.choice((rng.randrange(128), rng.randrange(0xD800))) for _ in range(rng.randrange(most)))
    return "".join(map(chr, codes))


def case(rng: random.Random, who: Sequence[str]) -> tuple[str, str, str, dict[str, str], bytes]:
    fields = {rng.choice(NAMES): value(rng) for _ in range(rng.randrange(9))}
    body = json.dumps(rng.choice((GOOD | fields, fields, value(rng)))).encode()
    if rng.random() < 0.25:
        body = rng.randbytes(rng.randrange(64))
    headers = {rng.choice(HEADER_NAMES): rng.choice(HEADER_VALUES) for _ in range(rng.randrange(4))}
    path = rng.choice(PATHS) if rng.random() < 0.5 else "/" + text(rng, 20)
    return rng.choice(who), rng.choice(METHODS), path, headers, body


@pytest.mark.long
def test_any_request_is_answered(world: World) -> None:
    paths = st.sampled_from(PATHS) | st.text("/v1abc%.é\0", max_size=20)
    with closing(Fuzzer(world)) as fuzzer:

        @given(st.sampled_from(sorted(fuzzer.keys)), st.sampled_from(METHODS), paths, HEADERS, BODIES)
        @CHECKS
        def one(who: str, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
            fuzzer.run(who, method, path, headers, body)

        one()
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
    assert not world.state.meter.under_way
    assert not any(world.state.meter.loads.waited.values())
    # The event loop has ended before its timer.
    world.usage.write()
    with closing(sqlite3.connect(world.usage.path)) as log:
        rows = log.execute("SELECT count(*) FROM requests WHERE state = 'admitted'").fetchone()
    assert rows == (0,)
    assert all(resident.users == 0 for resident in world.state.residency.residents.values())


@pytest.mark.slow
def test_fifty_thousand_requests_leave_memory_flat(world: World) -> None:
    """Hypothesis keeps 6 kB of each case, so these are drawn without it."""
    rng = random.Random(0)
    with closing(Fuzzer(world)) as fuzzer:

        def memory_after(cases: int) -> int:
            for _ in range(cases):
                fuzzer.run(*case(rng, sorted(fuzzer.keys)))
            gc.collect()
            return psutil.Process().memory_info().rss

        before = memory_after(WARM)
        assert memory_after(MANY) - before < 100 << 20
