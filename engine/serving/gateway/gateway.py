"""The gateway inside vLLM's server: who asks, which revision answers, and what came of it.

An ASGI middleware in front of vLLM's own routes: authenticate, resolve the policy's route, bring
the adapter into the host tier, rewrite `model`, pass on, spool one observation. Knows nothing of
how an adapter is loaded.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from engine.catalog.catalog import Key, Revision
from engine.errors import Ambiguous, Busy, GraftworkError, NotFound
from engine.ledger.spool import Spool
from engine.serving.gateway.routing import Router, Target
from engine.serving.residency.load_queue import BACKGROUND, INTERACTIVE
from engine.serving.residency.residency import Residency

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Done = TypeVar("Done")

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/graftwork/marker"})
GENERATING = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/graftwork/rollouts": "rollouts-",
}
# One request of this asks for thousands of samples.
NOT_FOR_USERS = frozenset({"/graftwork/rollouts"})
# vLLM's server has more routes, some of which load adapters or generate past every gate of ours.
PASSED_PATHS = frozenset(
    {
        "/v1/models",
        "/v1/feedback",
        "/v1/prewarm",
        "/tokenize",
        "/detokenize",
        "/graftwork/residency",
        "/graftwork/loads",
    }
)
PURPOSES = frozenset({"user", "score", "rollout", "probe"})
MAX_BODY = 8 << 20
CLIENT_LEFT = 499


class Refused(GraftworkError):
    """A request that is answered here, with this status."""

    def __init__(self, status: int, message: str):
        super().__init__(status, message)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass
class GatewayState:
    """What the server gives the gateway once the engine is up."""

    router: Router
    residency: Residency
    spool: Spool
    name: str


@dataclass
class Exchange:
    """One request under way and what is observed of it."""

    id: str
    key: Key
    target: Target
    unit: str | None
    purpose: str
    admitted_at: float
    started: float
    status: int = 500
    ttft_s: float | None = None
    usage: dict[str, int] | None = None

    def observation(self, gateway: str) -> dict[str, Any]:
        usage = self.usage or {}
        return {
            "id": self.id,
            "at": self.admitted_at,
            "policy": self.target.policy,
            "digest": self.target.digest,
            "arm": self.target.arm,
            "unit": self.unit,
            "key": self.key.hash,
            "status": self.status,
            "latency_s": time.perf_counter() - self.started,
            "ttft_s": self.ttft_s,
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "route_version": self.target.route_version,
            "gateway": gateway,
            "purpose": self.purpose,
        }


class Gateway:
    """ASGI middleware; its state is `app.state.graftwork`, set when the engine is up."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            state = getattr(scope["app"].state, "graftwork", None)
            if state is None:
                raise Refused(503, "The engine is starting.")
            key = authenticate(state.router, headers)
            scope.setdefault("state", {})["graftwork_key"] = key
            if scope["path"] in PASSED_PATHS:
                return await self._app(scope, receive, send)
            if scope["path"] not in GENERATING:
                raise Refused(404, f"{scope['path']} is not served; ask {' or '.join(GENERATING)}.")
            if scope["path"] in NOT_FOR_USERS and key.scope == "user":
                raise Refused(403, f"{scope['path']} needs a key of scope 'score' or 'admin'.")
            await self._generate(state, key, headers, scope, receive, send)
        except GraftworkError as error:
            await send_error(send, error)

    async def _generate(
        self, state: GatewayState, key: Key, headers: dict[str, str], scope: Any, receive: Receive, send: Send
    ) -> None:
        started, admitted_at = time.perf_counter(), time.time()
        body = parse(await read_body(receive))
        purpose = purpose_of(headers, key)
        request_id = uuid.uuid4().hex
        unit = body.get("user") or headers.get("x-session-id")
        target = state.router.resolve(str(body.get("model") or ""), str(unit or request_id), purpose)
        exchange = Exchange(
            id=GENERATING[scope["path"]] + request_id,
            key=key,
            target=target,
            unit=hash_unit(target, str(unit)) if unit else None,
            purpose=purpose,
            admitted_at=admitted_at,
            started=started,
        )
        try:
            if target.digest is None or target.policy is None:
                body["model"] = state.router.base_name
                await self._forward(exchange, body, scope, receive, send)
            else:
                revision = state.router.revision(target.policy, target.digest)
                body["model"] = name = await self._hold(state, revision, purpose, receive)
                try:
                    await self._forward(exchange, body, scope, receive, send)
                finally:
                    state.residency.release(name)
        except GraftworkError as error:
            exchange.status = error.status
            raise
        finally:
            state.spool.emit("observations", **exchange.observation(state.name))

    async def _hold(self, state: GatewayState, revision: Revision, purpose: str, receive: Receive) -> str:
        """Wait until the revision's adapter is there; a client that leaves meanwhile waits no longer."""
        name = state.residency.hold_warm(revision)
        if name is None:
            priority = INTERACTIVE if purpose == "user" else BACKGROUND
            name = await unless_left(
                receive, state.residency.hold(revision, priority), state.residency.release
            )
        return name

    async def _forward(
        self, exchange: Exchange, body: dict[str, Any], scope: Any, receive: Receive, send: Send
    ) -> None:
        """Pass the request on with the new body; mark the response and note what it says of itself."""
        raw = orjson.dumps(body)
        replaced = {b"content-length", b"x-request-id"}
        scope["headers"] = [header for header in scope["headers"] if header[0] not in replaced] + [
            (b"content-length", str(len(raw)).encode()),
            (b"x-request-id", exchange.id.rpartition("-")[2].encode()),
        ]
        revision = (exchange.target.name or "base").encode()
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-graftwork-revision", revision)]
            elif exchange.ttft_s is None:
                exchange.ttft_s = time.perf_counter() - exchange.started
                if not message.get("more_body") and not body.get("stream"):
                    exchange.usage = usage_of(message.get("body", b""))
            await send(message)

        await self._app(scope, replay, observe)


def authenticate(router: Router, headers: dict[str, str]) -> Key:
    """Return the request's key; `Refused` (401) without one in force."""
    scheme, _, plaintext = headers.get("authorization", "").partition(" ")
    key = router.key(plaintext) if scheme.lower() == "bearer" else None
    if key is None:
        raise Refused(401, "Give a key in force: `Authorization: Bearer gw-...` (`graftwork key create`).")
    return key


def purpose_of(headers: dict[str, str], key: Key) -> str:
    """Return what the request is for; anything but `user` needs a key of scope admin or score."""
    purpose = headers.get("x-graftwork-purpose", "user")
    if purpose not in PURPOSES:
        raise Refused(400, f"x-graftwork-purpose is one of {', '.join(sorted(PURPOSES))}, not {purpose!r}.")
    if purpose != "user" and key.scope == "user":
        raise Refused(403, f"A key of scope 'user' may not ask for the purpose {purpose!r}.")
    return purpose


def hash_unit(target: Target, unit: str) -> str:
    """Return the name under which a unit is counted; the ledger never holds the unit itself."""
    return hashlib.sha256(f"{target.policy}\0{unit}".encode()).hexdigest()[:24]


def usage_of(body: bytes) -> dict[str, int] | None:
    """Return a response's token counts, if it has any."""
    start = body.rfind(b'"usage":{')
    if start < 0:
        return None
    try:
        return orjson.loads(body)["usage"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


async def read_body(receive: Receive) -> bytes:
    """Return the whole request body; `Refused` (413) over 8 MiB."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The client went away before its request was complete.")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise Refused(413, f"The request is over {MAX_BODY >> 20} MiB.")
        if not message.get("more_body"):
            return b"".join(chunks)


async def unless_left(
    receive: Receive, work: Coroutine[Any, Any, Done], give_back: Callable[[Done], object]
) -> Done:
    """Return what `work` does; cancel it and raise `Refused` (499) when the client goes away first.

    `give_back` gets what it did for a caller that is cancelled in the moment in which it ends.
    """
    taken = False
    working: asyncio.Task[Done] = asyncio.create_task(work)
    # The body has been read: all that can still come is that the client goes.
    left: asyncio.Future[Message] = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            taken = True
            return working.result()
        raise Refused(CLIENT_LEFT, "The client went away before its adapter was loaded.")
    finally:
        left.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
        if not taken and not working.cancelled() and working.exception() is None:
            give_back(working.result())


def parse(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The request is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused(400, "The request must be a JSON object.")
    return body


async def send_error(send: Send, error: GraftworkError) -> None:
    """Answer in the form of OpenAI's API."""
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, Busy):
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    fault: dict[str, Any] = {"message": str(error), "type": type(error).__name__, "code": error.status}
    if isinstance(error, NotFound):
        fault["nearest"] = error.nearest
    elif isinstance(error, Ambiguous):
        fault["candidates"] = error.candidates
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps({"error": fault})})
