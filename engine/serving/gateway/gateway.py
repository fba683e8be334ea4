"""The gateway: an ASGI middleware in front of vLLM's own routes.

A request is one `Call`, which goes through the stages in `serve`: it is admitted, read, routed, metered,
held, forwarded, observed and settled.
"""

from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from engine.errors import GraftworkError
from engine.logs import REQUEST
from engine.serving.gateway.admission import FailedKeys, NoKey, admit
from engine.serving.gateway.api_errors import reason_of, send_error, send_no_key
from engine.serving.gateway.asgi import App, Message, Receive, Refused, Send, answer
from engine.serving.gateway.call import Call, GatewayState, new_seed, observe
from engine.serving.gateway.forwarding import FORWARDED, answers_with, forward
from engine.serving.gateway.holding import hold, release, route
from engine.serving.gateway.reading import read
from engine.serving.gateway.route_table import NOWHERE, ROUTE_OF, Kind

POLICY_VIOLATION = 1008
PREFLIGHT = {b"origin", b"access-control-request-method"}
TOO_MANY, SERVER_ERROR = 429, 500


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
