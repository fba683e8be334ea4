"""A gateway in front of a fake server, over a real catalog with one policy and its canary."""

import asyncio
import errno
import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import httpx

from engine.catalog.catalog import Base, Policy, Revision, migrate
from engine.catalog.opening import whole_catalog
from engine.metering.usage_log import UsageLog
from engine.serving.gateway.call import GatewayState
from engine.serving.gateway.gateway import Gateway
from engine.serving.gateway.meter import Meter
from engine.serving.gateway.routing import Router
from engine.serving.gateway.suggesting import Suggester
from engine.serving.residency.residency import Residency
from engine.settings.services import EngineConfig, GatewayConfig
from engine.store.segments import Store

CHAMPION, CANARY = "a" * 64, "b" * 64


class Events:
    """A spool in memory; with a full disk it raises as the real one does."""

    def __init__(self):
        self.rows, self.is_full = [], False

    def emit(self, table, **fields):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.rows.append((table, fields))


class Engine:
    """Loads take `seconds`, and end only while `may_end` is set; `faults` are raised one after the other."""

    def __init__(self):
        self.seconds, self.faults, self.prepared = 0.0, [], []
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def prepare(self, name, address):
        self.prepared.append(name)
        await asyncio.sleep(self.seconds)
        await self.may_end.wait()
        if self.faults:
            raise self.faults.pop(0)

    async def forget(self, name): ...


class AnyGrammar:
    """Takes whatever constrains an answer: nothing is compiled here."""

    async def check(self, constraints, tenant): ...


class Server:
    """What stands behind the gateway: notes each body and answers like vLLM.

    A model in `instead` has that function answer, which takes `receive` and `send`.
    """

    def __init__(self):
        self.seen, self.status, self.instead = [], 200, {}

    async def __call__(self, scope, receive, send):
        message = await receive()
        body = json.loads(message["body"]) if message.get("body") else {}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        assert "content-length" not in headers or int(headers["content-length"]) == len(
            message.get("body", b"")
        )
        self.seen.append((scope["path"], body, headers))
        if body.get("model") in self.instead:
            return await self.instead[body["model"]](receive, send)
        answer = {
            "id": f"cmpl-{headers.get('x-request-id')}",
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        }
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer, separators=(",", ":")).encode()})


def make_world(tmp_path):
    """Return the gateway's parts, and clients with a key of each scope. Close its `usage`."""
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    catalog = whole_catalog(url)
    catalog.bases.add(Base("base", "tiny", "/tiny", 0.0))
    catalog.policies.add(Policy("sums", "base", {}, "me", 0.0))
    layout = hashlib.sha256(b"{}").hexdigest()
    catalog.layouts.add(layout, "{}")
    for digest in (CHAMPION, CANARY):
        catalog.revisions.add_many(
            [
                Revision(
                    "sums", digest, "base", None, 1, 8, 10, layout, "s", 0, 10, "cc", "exported", "me", 0.0
                )
            ]
        )
    route = catalog.routes.get("sums")
    catalog.routes.update(replace(route, champion=CHAMPION, canary=CANARY, weight=0.5), route.version)
    server, events, engine, loads = Server(), Events(), Engine(), []
    usage = UsageLog(tmp_path / "usage")
    state = GatewayState(
        Router(catalog, "tiny", "base", suggest=Suggester),
        Residency(
            engine,
            catalog,
            Store(tmp_path),
            EngineConfig(),
            on_load=lambda **fields: loads.append(fields["priority"]),
            load_places=4,
        ),
        events,
        "here",
        256,
        AnyGrammar(),
        GatewayConfig(),
        Meter(usage, 4),
    )
    app = SimpleNamespace(state=SimpleNamespace(graftwork=state))

    async def with_app(scope, receive, send):
        scope["app"] = app
        await Gateway(server)(scope, receive, send)

    keys = {scope: catalog.keys.create("me", scope) for scope in ("admin", "user", "score")}
    keys["pin"] = catalog.keys.create("me", ["infer", "pin", "feedback"])

    def client(scope="pin"):
        headers = {"authorization": f"Bearer {keys[scope]}"} if scope else {}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(with_app), base_url="http://gateway", headers=headers
        )

    return SimpleNamespace(
        catalog=catalog, server=server, events=events, client=client, keys=keys, app=app, engine=engine,
        state=state, call=with_app, loads=loads, usage=usage,
    )  # fmt: skip


async def warm(world, digest: str) -> None:
    """Bring a revision into the host tier."""
    residency = world.state.residency
    residency.release(await residency.hold(world.catalog.revisions.get("sums", digest)), is_use=False)


def unit_of(world, arm: str) -> str:
    """Return a unit that the route sends to this arm."""
    return next(unit for unit in map(str, range(1000)) if world.state.router.resolve("sums", unit).arm == arm)
