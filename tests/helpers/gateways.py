"""Gateways in front of a fake of vLLM's server, on a real catalog and a real usage log."""

import asyncio
import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from engine.catalog.catalog import Base, Catalog, Policy, Revision, migrate
from engine.catalog.opening import whole_catalog
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.usage_log import UsageLog
from engine.serving.gateway.answers import AnswerReader
from engine.serving.gateway.call import Call, GatewayState
from engine.serving.gateway.gateway import Gateway
from engine.serving.gateway.membership import Membership
from engine.serving.gateway.meter import Meter
from engine.serving.gateway.reading import size_of
from engine.serving.gateway.route_table import ROUTE_OF
from engine.serving.gateway.routing import Router, Target
from engine.serving.gateway.suggesting import Suggester
from engine.serving.residency.residency import Residency
from engine.settings.services import EngineConfig, GatewayConfig
from engine.store.segments import Store
from tests.helpers.api_answers import APIS, COMPLETIONS, Said, pieces, whole
from tests.helpers.gateway_world import AnyGrammar

MAX_MODEL_LEN = 256
OWN = (
    "/v1/models",
    "/v1/prewarm",
    "/v1/feedback",
    "/graftwork/residency",
    "/graftwork/loads",
    "/graftwork/marker",
    "/graftwork/ready",
    "/graftwork/drain",
    "/graftwork/copies",
)


class Events:
    """A spool in memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def emit(self, table: str, **fields: Any) -> None:
        self.rows.append((table, fields))


class Loads:
    """An engine that prepares every adapter at once, or when `may_end` is set."""

    def __init__(self) -> None:
        self.prepared = list[str]()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        self.prepared.append(name)
        await asyncio.sleep(0)
        await self.may_end.wait()

    async def forget(self, name: str) -> None: ...


class FakeVllm:
    """Answers as vLLM does, a token a step, and counts by request what it computed.

    A prompt has a token for each word, a completion `max_tokens`, unless `short` says fewer. `finished` has
    (prompt, completion) of each request that has ended, however it did.
    """

    def __init__(self, step_s: float = 0.0):
        self.step_s, self.short = step_s, 1 << 30
        # Graftwork's own endpoints, by their app.
        self.own: FastAPI | None = None
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.under_way: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[int, int]] = {}
        self.fault: tuple[int, dict[str, Any]] | None = None

    def used(self, request_id: str) -> tuple[int, int] | None:
        found = self.under_way.get(request_id)
        return (found[0], found[1]) if found else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.own is not None and scope["path"].startswith(OWN):
            return await self.own(scope, receive, send)
        raw, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            raw += message.get("body", b"")
        route = ROUTE_OF[scope["path"]]
        # The gateway looks into the body of nothing else, and neither does the server.
        body = json.loads(raw) if raw and route.fields is not None else {}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append((scope["path"], body, headers))
        if self.fault is not None:
            return await self._whole(send, self.fault[0], self.fault[1])
        name = headers.get("x-request-id", "")
        prompt = body.get("prompt", body.get("messages", body.get("input", "")))
        words = len(json.dumps(prompt).split())
        tokens = body.get("max_tokens", body.get("max_completion_tokens", body.get("max_output_tokens", 16)))
        each, n = min(tokens, self.short), body.get("n", 1)
        tokens = each * n
        count = self.under_way[name] = [words, 0]
        gone = asyncio.ensure_future(left(receive))
        try:
            choices, used = [Said(("x",) * each)] * n, (words, tokens)
            if body.get("stream"):
                told = pieces(scope["path"], choices, used, body.get("tools", ()))
                await self._stream(told, count, tokens, gone, send)
            else:
                while count[1] < tokens and not gone.done():
                    await self._step(count)
                if not gone.done():
                    await self._whole(send, 200, self._answer(scope["path"], name, choices, used))
        finally:
            gone.cancel()
            self.finished[name] = (count[0], count[1])
            del self.under_way[name]

    async def _step(self, count: list[int]) -> None:
        await asyncio.sleep(self.step_s)
        count[1] += 1

    async def _stream(
        self, told: Sequence[bytes], count: list[int], tokens: int, gone: Any, send: Any
    ) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in told:
            if b'"x"' in piece and count[1] < tokens:
                await self._step(count)
            if gone.done():
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _answer(self, path: str, name: str, choices: Sequence[Said], used: tuple[int, int]) -> dict[str, Any]:
        if path not in APIS:
            return {"id": name}
        return {
            "id": f"cmpl-{name}" if path == COMPLETIONS else name,
            **json.loads(whole(path, choices, used)),
        }

    async def _whole(self, send: Any, status: int, body: dict[str, Any]) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body, separators=(",", ":")).encode()})


async def left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class World:
    """Two tenants' policies on one catalog, and a gateway before a fake server."""

    root: Path
    catalog: Catalog
    server: FakeVllm
    events: Events
    loads: Loads
    usage: UsageLog
    state: GatewayState
    app: Any

    def client(self, key: str | None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)

    def key(
        self, tenant: str = "acme", roles: Any = ("infer", "feedback"), policies: Any = None, **more: Any
    ) -> str:
        patterns = [f"{tenant}-*"] if policies is None else policies
        return self.catalog.keys.create(tenant, roles, patterns, **more)

    def call(self, key: str, id: str, prompt: str = "one two", max_tokens: int = 8) -> Call:
        """Return a call that is admitted, read and routed: one that may be metered."""
        found = Call(self.state, {}, None, None, ROUTE_OF[COMPLETIONS], id)  # type: ignore[arg-type]
        found.key = self.catalog.keys.find(key)
        found.tenant = self.catalog.keys.tenant(found.key.owner)
        found.body, found.purpose = {"prompt": prompt, "max_tokens": max_tokens}, "user"
        found.body_bytes, found.size = len(json.dumps(found.body)), size_of(found.body, 16)
        found.answer, found.admitted_at = AnswerReader(COMPLETIONS), time.time()
        found.target = Target("acme-sums", CHAMPION, "champion")
        return found

    def usage_state(self, id: str) -> str | None:
        """Return the state of a completion's row in the usage log, if it is written yet."""
        with closing(sqlite3.connect(self.usage.path)) as log:
            found = log.execute("SELECT state FROM requests WHERE id = ?", (f"cmpl-{id}",)).fetchone()
        return found[0] if found else None

    def close(self) -> None:
        self.usage.close()
        self.catalog.close()


def open_world(
    root: Path,
    settings: GatewayConfig | None = None,
    load_places: int = 1024,
    server: FakeVllm | None = None,
    url: str | None = None,
    shared: SharedBudgets | None = None,
) -> World:
    """Tenants acme and umbrella have a policy `TENANT-sums` each, with a champion and another revision.

    Without a `server`, Graftwork's own endpoints are behind the gateway, too. Without a `url`, the catalog is
    in a file of `root`. Usage is copied to `shared`.
    """
    url = url or f"sqlite:///{root}/catalog.db"
    migrate(url)
    catalog = whole_catalog(url)
    if not catalog.bases.names():
        fill(catalog)
    has_own = server is None
    server, events, loads, usage = server or FakeVllm(), Events(), Loads(), UsageLog(root / "usage", shared)
    state = GatewayState(
        Router(catalog, "tiny", "base", suggest=Suggester),
        Residency(loads, catalog, Store(root), EngineConfig(), load_places=load_places),
        events,  # type: ignore[arg-type]
        "here",
        MAX_MODEL_LEN,
        AnyGrammar(),  # type: ignore[arg-type]
        settings or GatewayConfig(),
        Meter(usage, load_places),
        server.used,
    )
    if has_own:
        server.own = own_endpoints(state, catalog, "here")
    holder = SimpleNamespace(state=SimpleNamespace(graftwork=state))
    gateway = Gateway(server)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = holder
        await gateway(scope, receive, send)

    return World(root, catalog, server, events, loads, usage, state, app)


def own_endpoints(state: GatewayState, catalog: Catalog, id: str) -> FastAPI:
    """Graftwork's endpoints of the engine `id` in an app with vLLM's answers to errors."""
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    from engine.serving.gateway.endpoints import Readiness, attach

    async def loads() -> list[Any]:
        return []

    app = FastAPI()
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)
    attach(app)
    app.state.graftwork, app.state.graftwork_loads = state, loads
    membership = Membership(catalog, id, f"http://{id}", "base", "1")
    membership.beat()
    why_not_ready = partial(membership.why_not_ready, state.router, list)
    app.state.graftwork_readiness = Readiness(why_not_ready, membership.drain)
    app.state.graftwork_marker = {"plugin": "fake"}
    return app


CHAMPION, OTHER = "a" * 64, "b" * 64


def fill(catalog: Catalog) -> None:
    import hashlib

    catalog.bases.add(Base("base", "tiny", "/tiny", 0.0))
    layout = hashlib.sha256(b"{}").hexdigest()
    catalog.layouts.add(layout, "{}")
    for tenant in ("acme", "umbrella"):
        policy = f"{tenant}-sums"
        catalog.policies.add(Policy(policy, "base", {}, tenant, time.time()))
        rows = [
            Revision(
                policy, digest, "base", None, 1, 8, 10, layout, "s", 0, 10, "cc" * 32, "exported", tenant, 0.0
            )
            for digest in (CHAMPION, OTHER)
        ]
        catalog.revisions.add_many(rows)
        route = catalog.routes.get(policy)
        catalog.routes.update(replace(route, champion=CHAMPION), route.version)
