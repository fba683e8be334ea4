"""The gateway: an ASGI middleware in front of vLLM's own routes.

A request is one `Call`, which goes through the stages in `serve`: it is admitted by its key, read, routed,
metered, held, forwarded, observed and settled.
"""

import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from engine.catalog.catalog import Key, Tenant
from engine.catalog.records import OURS, TINKERS
from engine.errors import GraftworkError, Unauthorized
from engine.logs import REQUEST
from engine.serving.gateway.api_errors import reason_of, send_error, send_no_key
from engine.serving.gateway.asgi import App, Message, Receive, Refused, Send, answer
from engine.serving.gateway.call import Call, GatewayState, id_for, new_seed, observe, require
from engine.serving.gateway.forwarding import FORWARDED, answers_with, forward
from engine.serving.gateway.holding import hold, release, route
from engine.serving.gateway.reading import read
from engine.serving.gateway.route_table import GENERATING, NOWHERE, ROUTE_OF, Endpoint, Kind
from engine.serving.gateway.routing import Router

POLICY_VIOLATION = 1008
PREFLIGHT = {b"origin", b"access-control-request-method"}
TOO_MANY, SERVER_ERROR = 429, 500
# Seconds between two lines on requests without a valid key.
SAYS_S = 10.0
log = logging.getLogger("graftwork.admission")
# A key may also be written as Tinker's SDK wants it.
KEY_LENGTHS = (len(OURS) + 40, len(TINKERS) + 40)
# The headers that the gateway reads.
READ = {b"authorization", b"x-api-key", b"x-graftwork-purpose", b"x-graftwork-segment", b"x-session-id"}


class NoKey(Unauthorized):
    """The request has no valid key. There may be many, so its answer is made ahead."""


class FailedKeys:
    """Logs requests without a valid key with a rate: they may be many."""

    def __init__(self) -> None:
        self._count, self._said_at = 0, -SAYS_S

    def note(self, client: str) -> None:
        """Take one more, from this address."""
        self._count += 1
        now = time.monotonic()
        if now - self._said_at >= SAYS_S:
            log.warning("%d requests had no valid key, the last one from %s.", self._count, client)
            self._count, self._said_at = 0, now


class Gateway:
    """The ASGI middleware; it reads its `GatewayState` from `app.state.graftwork`."""

    def __init__(self, app: App):
        self._app = app
        self._cors: CORSMiddleware | None = None
        self._failed = FailedKeys()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            # A WebSocket: refused before it is accepted, which its client sees as a 403.
            return await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        state: GatewayState | None = getattr(scope["app"].state, "graftwork", None)
        if state is None or not state.settings.cors_origins:
            return await self._answer(scope, receive, send)
        # It answers preflights and adds its headers to refusals, too.
        if self._cors is None:
            self._cors = cross_origin(self._answer, state.settings.cors_origins)
        if scope["method"] == "OPTIONS" and dict(scope["headers"]).keys() >= PREFLIGHT:
            # That middleware answers it alone.
            send = tagged(send, id_of(scope, state), is_counted=True)
        await self._cors(scope, receive, send)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a request, if only with a refusal."""
        state: GatewayState | None = getattr(scope["app"].state, "graftwork", None)
        scope.setdefault("state", {})
        id = id_of(scope, state)
        REQUEST.set(id)
        path, method = scope["path"], scope["method"]
        endpoint = ROUTE_OF[path]
        if not endpoint.roles and method in endpoint.methods:
            # Load balancers ask twice a second: that is nobody's request. As of a call no cookie goes on,
            # which FastAPI would parse in the square of its length (CVE-2024-7592).
            scope["headers"] = [header for header in scope["headers"] if header[0] in FORWARDED]
            return await self._app(scope, receive, tagged(send, id))
        if method == "OPTIONS" and endpoint is not NOWHERE:
            allowed = ", ".join(sorted({*endpoint.methods, "OPTIONS"}))
            answers_with(204, "").inc()
            return await answer(
                send, 204, headers=[(b"allow", allowed.encode()), (b"x-request-id", id.encode())]
            )
        call = None
        try:
            if state is None:
                raise Refused(503, "The engine is starting.")
            call = Call(state, scope, receive, send, endpoint, id)
            await self.serve(call)
        except NoKey as error:
            self._failed.note((scope.get("client") or ("unknown",))[0])
            answers_with(error.status, reason_of(error)).inc()
            await send_no_key(send, path, (b"x-request-id", id.encode()))
        except GraftworkError as error:
            if call is not None and call.key is not None and error.status < TOO_MANY:
                call.state.meter.refused(call)
            answers_with(error.status, reason_of(error)).inc()
            await send_error(send, error, path, ((b"x-request-id", (call.id if call else id).encode()),))

    async def serve(self, call: Call) -> None:
        """Serve a call, a stage a line."""
        await admit(call)
        await read(call)
        if call.endpoint.kind is not Kind.GENERATE:
            return await self._pass(call)
        await route(call)
        await call.state.meter.open(call)
        try:
            await self._attempt(call)
            if call.has_failed:
                call = call.in_its_place()
                await self._attempt(call)
        finally:
            # A failed attempt is not billed.
            call.state.meter.settle(call)
        return None

    async def _attempt(self, call: Call) -> None:
        """Have the call's target answer, and observe what came of it."""
        try:
            if call.constraints:
                await call.state.grammars.check(call.constraints, call.tenant.name)
            await hold(call)
            copied = call.state.copied
            await (forward if copied is None else copied)(call, self._app)
        except Exception as error:
            call.answer.status = error.status if isinstance(error, GraftworkError) else SERVER_ERROR
            raise
        finally:
            release(call)
            observe(call)

    async def _pass(self, call: Call) -> None:
        """Have the server answer what no revision does; a text's tokens are the base's for every model."""
        is_text, router = call.endpoint.kind is Kind.TOKENIZE, call.state.router
        with call.state.meter.counted(call, call.body_bytes if is_text else 0):
            if is_text and "model" in call.body:
                await router.admit(call.body["model"], "", key=call.key)
                call.body["model"] = router.base_name
            await forward(call, self._app)


async def admit(call: Call) -> None:
    """Take the call's key, tenant and id.

    Raises `NoKey`, `Forbidden` for a suspended tenant or a key without the role, `LimitReached` where no
    request of this minute is left, and `Refused` for another method.
    """
    state = call.state
    call.headers = headers = {
        name.decode(): value.decode("latin-1") for name, value in call.scope["headers"] if name in READ
    }
    call.looked_at = time.perf_counter()
    key, call.tenant = await state.router.ask(authenticate, state.router, headers)
    call.key = key
    call.scope["state"]["graftwork_key"] = key
    state.meter.refuse_spent(call)
    if call.endpoint is NOWHERE:
        raise refuse_path(call.scope["path"])
    refuse_method(call.endpoint, call.scope["path"], call.scope["method"])
    require(call.endpoint.path, call.endpoint.roles, key)
    call.id = id_for(key, call.id, state.router.hash_once)
    REQUEST.set(call.id)


def authenticate(router: Router, headers: Mapping[str, str]) -> tuple[Key, Tenant]:
    """Return the request's key, of `Authorization: Bearer` or Anthropic's `x-api-key`, and its tenant.

    Raises `NoKey` when it has none or an invalid one, `Forbidden` while the tenant is suspended.
    """
    scheme, _, plaintext = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        plaintext = headers.get("x-api-key", "")
    key = router.key(plaintext) if len(plaintext) in KEY_LENGTHS else None
    if key is None:
        raise NoKey
    tenant = router.tenant(key.owner)
    tenant.refuse_suspended()
    return key, tenant


def refuse_path(path: str) -> Refused:
    """Return the error for a path that is not served."""
    return Refused(404, f"{path[:200]} is not served. Use {' or '.join(GENERATING)}.", "unknown_url")


def refuse_method(endpoint: Endpoint, path: str, method: str) -> None:
    """Raise `Refused` (405) for a method that the endpoint does not take."""
    if method not in endpoint.methods:
        allowed = ", ".join(sorted(endpoint.methods))
        raise Refused(
            405,
            f"{path[:200]} does not take {method}. Use {allowed}.",
            headers=[(b"allow", allowed.encode())],
        )


def id_of(scope: Any, state: GatewayState | None) -> str:
    """Return a request's id before its key is known: what a proxy in front sets, or a new one."""
    is_given = state is not None and state.settings.proxy_sets_id
    return new_seed(dict(scope["headers"]).get(b"x-request-id", b"") if is_given else None)


def tagged(send: Send, id: str, is_counted: bool = False) -> Send:
    """Return a `send` that adds the request's id to an answer that is no call's."""

    def tag(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            if is_counted:
                answers_with(message["status"], "").inc()
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
        return send(message)

    return tag


def cross_origin(app: App, origins: Sequence[str]) -> CORSMiddleware:
    """Let pages of these origins call the API from a browser."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-graftwork-revision", "retry-after"],
    )
