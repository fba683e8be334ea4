"""The gateway: an ASGI middleware in front of vLLM's own routes.

For each request it looks the route up, authenticates the key, resolves the model name to a revision within
the key's policies, reserves its tokens, waits until the adapter is in the host tier, rewrites `model`,
forwards the request, settles what it used and spools one observation.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import orjson
from prometheus_client import Counter
from starlette.middleware.cors import CORSMiddleware

from engine.catalog.catalog import Key, Tenant
from engine.errors import GraftworkError
from engine.ledger.spool import Spool
from engine.logs import REQUEST
from engine.metering.usage_rows import Metered
from engine.serving.gateway.admission import (
    FailedKeys,
    authenticate,
    purpose_of,
    require,
    segment_of,
    served,
    session_of,
)
from engine.serving.gateway.api_errors import reason_of, send_error, send_no_key
from engine.serving.gateway.arms import CANARY, FALLBACK, Target
from engine.serving.gateway.asgi import (
    App,
    Message,
    Receive,
    Refused,
    Send,
    answer,
    nothing,
    read_body,
    unless_left,
)
from engine.serving.gateway.constraints import constraints_of
from engine.serving.gateway.exchange import Exchange, hash_unit
from engine.serving.gateway.forwarding import Counted, ForwardedCall, forward, uncounted
from engine.serving.gateway.grammar_trial import GrammarTrial
from engine.serving.gateway.meter import Bill, Meter
from engine.serving.gateway.request_fields import (
    check_fields,
    drop_fields,
    end_user_of,
    refuse_many_logprobs,
    size_of,
)
from engine.serving.gateway.request_ids import RecentIds, id_for, new_seed
from engine.serving.gateway.request_size import most_bytes, parse_within
from engine.serving.gateway.route_table import Endpoint, Kind, find_route
from engine.serving.gateway.routing import STALE_S, Router
from engine.serving.residency.load_queue import BACKGROUND, INTERACTIVE
from engine.serving.residency.residency import Residency
from engine.settings.params import served_name
from engine.settings.services import GatewayConfig

# Looks at the routes; returns who answers, and when the look began (epoch seconds).
Admit = Callable[[], Awaitable[tuple[Target, float]]]

ANSWERS = Counter(
    "graftwork_answers", "Answers, and for what the gateway refused a request.", ["status", "reason"]
)
# The headers that the gateway reads.
READ = {b"authorization", b"x-api-key", b"x-graftwork-purpose", b"x-graftwork-segment", b"x-session-id"}
POLICY_VIOLATION = 1008
NOT_FOUND, TOO_MANY, SERVER_ERROR = 404, 429, 500
# Most completions of one request by a key that scores or trains.
MOST_SAMPLES = 1 << 14
# The `model` of a request that the base answers, for its answer to carry.
ASKED: ContextVar[str | None] = ContextVar("asked", default=None)


@dataclass
class GatewayState:
    """What the gateway needs of the server; set once the engine is up.

    `counted` returns the tokens that the engine has spent on a request so far, by the request's id; `rated`
    are responses whose reward is known.
    """

    router: Router
    residency: Residency
    spool: Spool
    name: str
    meter: Meter
    settings: GatewayConfig
    grammars: GrammarTrial
    counted: Counted = uncounted
    rated: RecentIds = field(default_factory=RecentIds)


@dataclass(slots=True)
class Inbound:
    """A request whose key may call its endpoint; `id` is the request's id, `scope` ASGI's."""

    state: GatewayState
    id: str
    key: Key
    tenant: Tenant
    endpoint: Endpoint
    headers: dict[str, str]
    scope: Any
    receive: Receive
    send: Send


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
        asked = scope.setdefault("state", {})
        given = dict(scope["headers"]).get(b"x-request-id", b"") if sets_id(state) else None
        asked["graftwork_request"] = new_seed(given)
        REQUEST.set(asked["graftwork_request"])

        def tagged(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                if not asked.get("graftwork_probe"):
                    answers_with(message["status"], asked.get("graftwork_reason", "")).inc()
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", asked["graftwork_request"].encode()),
                ]  # fmt: skip
            return send(message)

        if state is not None and state.settings.cors_origins:
            # It answers preflights and adds its headers to refusals, too.
            if self._cors is None:
                self._cors = cross_origin(self._serve, state.settings.cors_origins)
            return await self._cors(scope, receive, tagged)
        await self._serve(scope, receive, tagged)

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        endpoint = find_route(path)
        if endpoint is not None and not endpoint.roles and method in endpoint.methods:
            # Load balancers ask twice a second: that is nobody's request.
            scope["state"]["graftwork_probe"] = True
            return await self._app(scope, receive, send)
        if endpoint is not None and method == "OPTIONS":
            allowed = ", ".join(sorted({*endpoint.methods, "OPTIONS"}))
            return await answer(send, 204, headers=[(b"allow", allowed.encode())])
        found = None
        try:
            state = getattr(scope["app"].state, "graftwork", None)
            if state is None:
                raise Refused(503, "The engine is starting.")
            headers = {
                name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in READ
            }
            found = await state.router.ask(partial(authenticate, state.router, headers))
            if found is None:
                self._failed.note((scope.get("client") or ("unknown",))[0])
                scope["state"]["graftwork_reason"] = "invalid_api_key"
                return await send_no_key(send, path)
            key, tenant = found
            state.meter.refuse_spent(key, tenant)
            endpoint = served(path, method)
            require(endpoint.path, endpoint.roles, key)
            request_id = id_for(key, scope["state"]["graftwork_request"], state.router.hash_once)
            scope["state"] |= {"graftwork_key": key, "graftwork_request": request_id}
            REQUEST.set(request_id)
            asked = Inbound(state, request_id, key, tenant, endpoint, headers, scope, receive, send)
            await self._dispatch(asked)
        except GraftworkError as error:
            scope["state"]["graftwork_reason"] = reason_of(error)
            if state is not None and found is not None and error.status < TOO_MANY:
                state.meter.refused(*found)
            await send_error(send, error, path)

    async def _dispatch(self, asked: Inbound) -> None:
        endpoint = asked.endpoint
        # Who scores and trains sends batches.
        is_batch = asked.key.may("score", "train")
        context = None if is_batch else asked.state.meter.context
        most = endpoint.most_body if context is None else min(endpoint.most_body, most_bytes(context))
        raw = b"" if asked.scope["method"] == "GET" else await read_body(asked.receive, most)
        if endpoint.fields is None:
            with asked.state.meter.call(asked.key, asked.tenant):
                return await self._pass(asked, ForwardedCall.of(asked.id, endpoint.path, {}), raw)
        body = parse_within(raw, context)
        check_fields(body, endpoint.fields)
        unit = end_user_of(body) or session_of(asked.headers)
        drop_fields(body)
        if endpoint.kind is Kind.TOKENIZE:
            with asked.state.meter.call(asked.key, asked.tenant, len(raw)):
                return await self._tokenize(asked, body)
        size = size_of(body, endpoint.tokens)
        most = MOST_SAMPLES if is_batch else asked.state.settings.max_samples
        if size.samples > most:
            said = f"The request asks for {size.samples} completions, n for each prompt; the most is {most}."
            raise Refused(400, said, "invalid_value", "n")
        if context is not None:
            refuse_many_logprobs(body, min(len(raw), context * size.prompts), size, context)
        reserved = asked.state.meter.reserve(asked.key, asked.tenant, body, len(raw), size)
        if reserved.length is not None:
            body[endpoint.length] = reserved.length
        await self._generate(asked, body, unit, reserved.tokens, size.samples)

    async def _pass(self, asked: Inbound, call: ForwardedCall, body: bytes) -> None:
        """Have vLLM's app answer the request with this body."""
        await forward(self._app, call, body, asked.scope, asked.receive, asked.send)

    async def _tokenize(self, asked: Inbound, body: dict[str, Any]) -> None:
        """Forward the request to the base, whichever model that may be asked for it names."""
        router = asked.state.router
        if "model" in body:
            await router.admit(body["model"], "", key=asked.key)
            body["model"] = router.base_name
        await self._pass(asked, ForwardedCall.of(asked.id, asked.endpoint.path, body), orjson.dumps(body))

    async def _generate(
        self, asked: Inbound, body: dict[str, Any], unit: str | None, reserved: int, choices: int
    ) -> None:
        started = time.perf_counter()
        state, key = asked.state, asked.key
        purpose = purpose_of(asked.endpoint.path, asked.headers, key)
        model = body.get("model")
        if not model:
            raise Refused(400, "The request names no model.", "invalid_value", "model")
        constraints = constraints_of(body, key)
        admit = partial(state.router.admit, model, unit or asked.id, purpose, key)
        target, admitted_at = await admit()
        exchange = Exchange(
            id=asked.endpoint.id_prefix + asked.id,
            key=key,
            target=target,
            unit=hash_unit(state.router, key, target, unit) if unit else None,
            segment=segment_of(asked.headers),
            purpose=purpose,
            admitted_at=admitted_at,
            started=started,
            is_stream=body.get("stream") is True,
        )
        bill = await state.meter.open(key, asked.tenant, metered(exchange, reserved, state.settings))
        call = ForwardedCall.of(asked.id, asked.endpoint.path, body, bill.priority, state.counted, choices)
        try:
            await state.grammars.check(constraints, key.owner)
            if not await self._answer(asked, exchange, admit, call, bill, body):
                exchange.take_told(call)
                exchange.as_attempt().record(state.spool, state.name)
                exchange = exchange.again(await instead_of(state.router, exchange.target))
                # A failed attempt is not billed.
                call = call.again()
                await self._answer(asked, exchange, admit, call, bill, body)
        except GraftworkError as error:
            exchange.status = error.status
            raise
        except Exception:
            exchange.status = SERVER_ERROR
            raise
        finally:
            exchange.take_told(call)
            exchange.record(state.spool, state.name)
            state.meter.settle(bill, exchange.status, exchange.target.digest, call.used)

    async def _answer(
        self,
        asked: Inbound,
        exchange: Exchange,
        admit: Admit,
        call: ForwardedCall,
        bill: Bill,
        body: dict[str, Any],
    ) -> bool:
        """Have the target answer; False when it is a canary that failed before anything was sent."""
        state = asked.state
        name = await self._hold(asked, exchange, admit)
        if name is None:
            ASKED.set(body["model"])
        ours = settings_of(asked) | {"model": name or state.router.base_name}
        try:
            return await self._forward(asked, exchange, call, bill, body | ours)
        finally:
            if name is not None:
                state.residency.release(name)

    async def _hold(self, asked: Inbound, exchange: Exchange, admit: Admit) -> str | None:
        """Hold the target's adapter in the host tier; return its served name, or None for the base.

        A cold adapter may take a minute. After each such wait the request is admitted again and follows the
        routes as they are then: it never reaches a revision that was rolled back, retired, purged or
        quarantined meanwhile. The wait ends when the client leaves. Nobody waits for a canary: while it is
        not resident, another answers in its place.
        """
        state, priority = asked.state, INTERACTIVE if exchange.purpose == "user" else BACKGROUND
        residency = state.residency
        is_again = exchange.target.arm == FALLBACK
        while True:
            if exchange.target.arm == CANARY:
                if not is_again and (canary := await hold_canary(state, exchange.target)) is not None:
                    return canary
                exchange.target = await instead_of(state.router, exchange.target)
            policy, digest = exchange.target.policy, exchange.target.digest
            if policy is None or digest is None:
                return None
            seen = state.router.seen
            revision = await state.router.ask(partial(state.router.revision, policy, digest))
            if seen != state.router.seen:
                # A thread read it, and something has changed meanwhile.
                exchange.target, exchange.admitted_at = await admit()
                if exchange.target.digest != digest:
                    continue
            if (warm := residency.hold_warm(revision)) is not None:
                return warm
            with state.meter.cold_load(asked.key, asked.tenant, served_name(policy, digest)):
                held = residency.hold(revision, priority)
                name = await unless_left(asked.receive, held, residency.release)
            with ExitStack() as otherwise:
                otherwise.callback(residency.release, name, is_use=False)
                await residency.refuse_quarantined(revision)
                exchange.target, exchange.admitted_at = await admit()
                if exchange.target.digest == digest:
                    otherwise.pop_all()
                    return name

    async def _forward(
        self, asked: Inbound, exchange: Exchange, call: ForwardedCall, bill: Bill, body: dict[str, Any]
    ) -> bool:
        """Forward the request with the new body, mark the response and record its status and times.

        A canary's response is kept back until its first byte. False when it failed before that: nothing was
        sent.
        """
        revision = (exchange.target.name or "base").encode()
        is_canary, kept = exchange.target.arm == CANARY, list[Message]()
        has_failed, send = False, asked.send

        async def watch() -> Message:
            message = await asked.receive()
            exchange.has_left |= message["type"] == "http.disconnect"
            return message

        def observe(message: Message) -> Awaitable[None]:
            nonlocal has_failed
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                ours = [(b"x-graftwork-revision", revision), *bill.headers()]
                message["headers"] = [*message.get("headers", ()), *ours]
                if is_canary:
                    kept.append(message)
                    return nothing()
            elif exchange.has_left and exchange.ttft_s is None:
                # vLLM ends the answer to a client that has left with 200 and nothing in it.
                return nothing()
            else:
                exchange.take(message.get("body", b""))
            if kept:
                exchange.status = call.answer.status or exchange.status
                has_failed = is_fault(exchange.status)
                if not has_failed:
                    return both(send, kept.pop(), message)
            return nothing() if has_failed else send(message)

        try:
            # The server writes into its scope, and a canary's may be needed again.
            await forward(self._app, call, orjson.dumps(body), dict(asked.scope), watch, observe)
        except Exception:
            if not is_canary or exchange.ttft_s is not None or exchange.is_unanswered:
                raise
            exchange.status, has_failed = SERVER_ERROR, True
        return not has_failed


@cache
def answers_with(status: int, reason: str) -> Counter:
    """Return the counter of these answers. Both labels are of few words: no client makes one."""
    return ANSWERS.labels(status, reason)


def sets_id(state: GatewayState | None) -> bool:
    """Return whether the proxy in front sets each request's id."""
    return state is not None and state.settings.proxy_sets_id


async def instead_of(router: Router, canary: Target) -> Target:
    """Return who answers in a canary's place."""
    return await router.ask(partial(router.instead_of, canary))


async def hold_canary(state: GatewayState, target: Target) -> str | None:
    """Hold a canary if it is resident here, and return its served name; else prewarm it and return None."""
    # Whatever keeps it from being loaded, no user's request may fail by it.
    with suppress(GraftworkError):
        seen = state.router.seen
        wanted = partial(state.router.revision, target.policy or "", target.digest or "")
        revision = await state.router.ask(wanted)
        if seen != state.router.seen or state.router.unread_s > STALE_S:
            # While it was read it may have been rolled back.
            return None
        if (name := state.residency.hold_warm(revision)) is not None:
            return name
        state.residency.prewarm(revision)
    return None


async def both(send: Send, *messages: Message) -> None:
    """Send one message after the other."""
    for message in messages:
        await send(message)


def is_fault(status: int) -> bool:
    """Return whether a canary's status is no fault of its user: an error, or a name that vLLM cannot find."""
    return status >= SERVER_ERROR or status == NOT_FOUND


def metered(exchange: Exchange, reserved: int, settings: GatewayConfig) -> Metered:
    """Return what the usage log records of a request that reserves this many tokens."""
    return Metered(
        id=exchange.id,
        tenant=exchange.key.owner,
        key=exchange.key.id,
        policy=exchange.target.policy or "",
        revision=exchange.target.digest or "",
        purpose=exchange.purpose,
        at=exchange.admitted_at,
        reserved=reserved,
        # Of a whole answer no byte is sent before its end; a stream that breaks is not asked again.
        repeated=int(settings.proxy_sets_id and not exchange.is_stream),
    )


def settings_of(asked: Inbound) -> dict[str, Any]:
    """Return the fields of vLLM's that the gateway alone sets.

    Tenants do not share the prefix cache: by the time to the first token one could guess another's prompts.
    """
    fields: dict[str, Any] = {}
    if not asked.state.settings.shared_prefix_cache:
        fields["cache_salt"] = asked.state.router.keyed_hash("prefix cache", asked.key.owner)
    if asked.endpoint.path == "/v1/responses":
        fields |= {"request_id": asked.endpoint.id_prefix + asked.id, "store": False}
    return fields


def cross_origin(app: App, origins: Sequence[str]) -> CORSMiddleware:
    """Let pages of these origins call the API from a browser."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-graftwork-revision", "retry-after"],
    )
