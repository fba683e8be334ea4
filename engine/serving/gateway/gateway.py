"""The gateway: an ASGI middleware in front of vLLM's own routes.

For each request it authenticates the key, resolves the model name to a revision, waits until the adapter
is in the host tier, rewrites `model`, forwards the request and spools one observation.
"""

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.catalog.catalog import Key
from engine.errors import GraftworkError
from engine.ledger.spool import Spool
from engine.serving.gateway.arms import CANARY, FALLBACK, Target
from engine.serving.gateway.asgi import (
    App,
    Message,
    Receive,
    Refused,
    Send,
    parse,
    read_body,
    send_error,
    unless_left,
    with_body,
)
from engine.serving.gateway.exchange import Exchange, hash_unit
from engine.serving.gateway.outcomes import wants_json
from engine.serving.gateway.routing import Router
from engine.serving.residency.load_queue import BACKGROUND, INTERACTIVE
from engine.serving.residency.residency import Residency

# Looks at the routes; returns who answers, and when the look began (epoch seconds).
Admit = Callable[[], Awaitable[tuple[Target, float]]]

GET, POST = frozenset({"GET"}), frozenset({"POST"})
# What is served, by path and method; nothing else of vLLM's server can be reached. These need no key.
OPEN_PATHS = {
    "/health": GET,
    "/ping": GET | POST,
    "/version": GET,
    "/metrics": GET,
    "/graftwork/marker": GET,
}
# Not for keys of users: a single request asks for thousands of samples.
ROLLOUTS = "/graftwork/rollouts"
GENERATING = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    ROLLOUTS: "rollouts-",
}
# All adapters have their base's tokenizer, so no adapter is loaded.
TOKENIZING = frozenset({"/tokenize", "/detokenize"})
# These need a key, and answer without a revision. Some of vLLM's other routes load adapters or generate
# without any of our checks.
PASSED_PATHS = {
    "/v1/models": GET,
    "/v1/feedback": POST,
    "/v1/prewarm": POST,
    "/graftwork/residency": GET,
    "/graftwork/loads": GET,
}
# Followed by a model's name.
MODEL_PATH = "/v1/models/"
METHODS = OPEN_PATHS | PASSED_PATHS | dict.fromkeys([*GENERATING, *TOKENIZING], POST)
POLICY_VIOLATION = 1008
PURPOSES = frozenset({"user", "score", "rollout", "probe"})
SERVER_ERROR, NOT_FOUND = 500, 404
# The `model` of a request that the base answers, for its answer to carry.
ASKED: ContextVar[str | None] = ContextVar("asked", default=None)


@dataclass
class GatewayState:
    """What the gateway needs of the server; set once the engine is up."""

    router: Router
    residency: Residency
    spool: Spool
    name: str


class Gateway:
    """The ASGI middleware; it reads its `GatewayState` from `app.state.graftwork`."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            # A WebSocket: refused before it is accepted, which its client sees as a 403.
            return await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        if scope["method"] in OPEN_PATHS.get(scope["path"], ()):
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
            refuse_unserved(scope["path"], scope["method"])
            if scope["path"] in PASSED_PATHS or scope["path"].startswith(MODEL_PATH):
                return await self._app(scope, receive, send)
            if scope["path"] in TOKENIZING:
                return await self._tokenize(state, scope, receive, send)
            if scope["path"] == ROLLOUTS and key.scope == "user":
                raise Refused(
                    403, f"{ROLLOUTS} requires a key of scope 'score' or 'admin'; this key's is 'user'."
                )
            await self._generate(state, key, headers, scope, receive, send)
        except GraftworkError as error:
            await send_error(send, error)

    async def _tokenize(self, state: GatewayState, scope: Any, receive: Receive, send: Send) -> None:
        """Forward the request to the base, whichever model that may be asked for it names."""
        body = parse(await read_body(receive))
        if body.get("model") is not None:
            await state.router.admit(str(body["model"]), "")
            body["model"] = state.router.base_name
        await self._app(scope, with_body(body, scope, receive), send)

    async def _generate(
        self, state: GatewayState, key: Key, headers: dict[str, str], scope: Any, receive: Receive, send: Send
    ) -> None:
        started = time.perf_counter()
        body = parse(await read_body(receive))
        purpose = purpose_of(scope["path"], headers, key)
        request_id = uuid.uuid4().hex
        unit = body.get("user") or headers.get("x-session-id")
        model = str(body.get("model") or "")
        admit = partial(state.router.admit, model, str(unit or request_id), purpose)
        target, admitted_at = await admit()
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
            if not await self._answer(state, exchange, admit, body, scope, receive, send):
                exchange.as_attempt().record(state.spool, state.name)
                exchange = exchange.again(state.router.instead_of(exchange.target))
                await self._answer(state, exchange, admit, body, scope, receive, send)
        except GraftworkError as error:
            exchange.status = error.status
            raise
        except Exception:
            exchange.status = SERVER_ERROR
            raise
        finally:
            exchange.record(state.spool, state.name)

    async def _answer(
        self, state: GatewayState, exchange: Exchange, admit: Admit, body: dict[str, Any], scope: Any,
        receive: Receive, send: Send,
    ) -> bool:  # fmt: skip
        """Have the target answer; False when it is a canary that failed before anything was sent."""
        name = await self._hold(state, exchange, admit, receive)
        if name is None:
            ASKED.set(str(body.get("model") or ""))
        try:
            rewritten = body | {"model": name or state.router.base_name}
            return await self._forward(exchange, rewritten, scope, receive, send)
        finally:
            if name is not None:
                state.residency.release(name)

    async def _hold(
        self, state: GatewayState, exchange: Exchange, admit: Admit, receive: Receive
    ) -> str | None:
        """Hold the target's adapter in the host tier; return its served name, or None for the base.

        A cold adapter may take a minute. After each such wait the request is admitted again and follows the
        routes as they are then: it never reaches a revision that was rolled back, retired, purged or
        quarantined meanwhile. The wait ends when the client leaves. Nobody waits for a canary: while it is
        not resident, another answers in its place.
        """
        residency, priority = state.residency, INTERACTIVE if exchange.purpose == "user" else BACKGROUND
        is_again = exchange.target.arm == FALLBACK
        while True:
            if exchange.target.arm == CANARY:
                if not is_again and (canary := hold_canary(state, exchange.target)) is not None:
                    return canary
                exchange.target = state.router.instead_of(exchange.target)
            policy, digest = exchange.target.policy, exchange.target.digest
            if policy is None or digest is None:
                return None
            revision = state.router.revision(policy, digest)
            if (warm := residency.hold_warm(revision)) is not None:
                return warm
            name = await unless_left(receive, residency.hold(revision, priority), residency.release)
            with ExitStack() as otherwise:
                otherwise.callback(residency.release, name, is_use=False)
                residency.refuse_quarantined(revision)
                exchange.target, exchange.admitted_at = await admit()
                if exchange.target.digest == digest:
                    otherwise.pop_all()
                    return name

    async def _forward(
        self, exchange: Exchange, body: dict[str, Any], scope: Any, receive: Receive, send: Send
    ) -> bool:
        """Forward the request with the new body, mark the response and record its status and times.

        A canary's response is kept back until its first byte. False when it failed before that: nothing was
        sent.
        """
        # The server writes into its scope, and a canary's may be needed again.
        scope = dict(scope)
        request_id = (b"x-request-id", exchange.id.rpartition("-")[2].encode())
        replay, is_json = with_body(body, scope, receive, request_id), wants_json(body)
        revision = (exchange.target.name or "base").encode()
        is_canary, kept = exchange.target.arm == CANARY, list[Message]()
        has_failed = False

        async def watch() -> Message:
            message = await replay()
            exchange.has_left |= message["type"] == "http.disconnect"
            return message

        async def observe(message: Message) -> None:
            nonlocal has_failed
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-graftwork-revision", revision)]
                if is_canary:
                    kept.append(message)
                    return
            elif exchange.is_unanswered:
                # vLLM ends the answer to a client that has left with 200 and nothing in it.
                return
            else:
                is_whole = not body.get("stream") and exchange.ttft_s is None and not message.get("more_body")
                exchange.take(message.get("body", b""), is_whole, is_json)
            has_failed |= bool(kept) and is_fault(exchange.status)
            if not has_failed:
                while kept:
                    await send(kept.pop())
                await send(message)

        try:
            await self._app(scope, watch, observe)
        except Exception:
            if not is_canary or exchange.ttft_s is not None or exchange.is_unanswered:
                raise
            exchange.status, has_failed = SERVER_ERROR, True
        return not has_failed


def hold_canary(state: GatewayState, target: Target) -> str | None:
    """Hold a canary if it is resident here, and return its served name; else prewarm it and return None."""
    # Whatever keeps it from being loaded, no user's request may fail by it.
    with suppress(GraftworkError):
        revision = state.router.revision(target.policy or "", target.digest or "")
        if (name := state.residency.hold_warm(revision)) is not None:
            return name
        state.residency.prewarm(revision)
    return None


def is_fault(status: int) -> bool:
    """Return whether a canary's status is no fault of its user: an error, or a name that vLLM cannot find."""
    return status >= SERVER_ERROR or status == NOT_FOUND


def refuse_unserved(path: str, method: str) -> None:
    """Raise `Refused` for a path that is not served (404), and for another method than its own (405)."""
    allowed = GET if path.startswith(MODEL_PATH) else METHODS.get(path)
    if allowed is None:
        raise Refused(404, f"{path} is not served. Use {' or '.join(GENERATING)}.")
    if method not in allowed:
        raise Refused(405, f"{path} does not take {method}. Use {' or '.join(sorted(allowed))}.", allowed)


def authenticate(router: Router, headers: dict[str, str]) -> Key:
    """Return the request's key. Raises `Refused` (401) when it has none or an invalid one."""
    scheme, _, plaintext = headers.get("authorization", "").partition(" ")
    key = router.key(plaintext) if scheme.lower() == "bearer" else None
    if key is None:
        raise Refused(
            401,
            "No valid API key was sent. Send `Authorization: Bearer gw-...`; "
            "`graftwork key create` makes a key.",
        )
    return key


def purpose_of(path: str, headers: dict[str, str], key: Key) -> str:
    """Return the request's purpose; any but `user` requires a key of scope `admin` or `score`.

    Without the header it is `rollout` for the path of rollouts, else `user`.
    """
    purpose = headers.get("x-graftwork-purpose", "rollout" if path == ROLLOUTS else "user")
    if purpose not in PURPOSES:
        raise Refused(
            400, f"x-graftwork-purpose must be one of {', '.join(sorted(PURPOSES))}, not {purpose!r}."
        )
    if purpose != "user" and key.scope == "user":
        raise Refused(
            403, f"x-graftwork-purpose {purpose!r} requires a key of scope 'score' or 'admin', not 'user'."
        )
    return purpose
