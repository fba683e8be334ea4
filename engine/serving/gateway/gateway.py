"""The gateway: an ASGI middleware in front of vLLM's own routes.

For each request it authenticates the key, resolves the model name to a revision, waits until the adapter
is in the host tier, rewrites `model`, forwards the request and spools one observation.
"""

import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from prometheus_client import Counter

from engine.catalog.catalog import Key
from engine.errors import GraftworkError
from engine.ledger.spool import Spool
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
from engine.serving.gateway.outcomes import outcome_of, streamed_outcome, wants_json
from engine.serving.gateway.routing import Router, Target
from engine.serving.residency.load_queue import BACKGROUND, INTERACTIVE
from engine.serving.residency.residency import Residency
from engine.settings.params import SEGMENT_NAME

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
UNOBSERVED = Counter("graftwork_observations_lost", "Requests whose observation could not be spooled.")
# The `model` of a request that the base answers, for its answer to carry.
ASKED: ContextVar[str | None] = ContextVar("asked", default=None)
log = logging.getLogger("graftwork.gateway")


@dataclass
class GatewayState:
    """What the gateway needs of the server; set once the engine is up."""

    router: Router
    residency: Residency
    spool: Spool
    name: str


@dataclass
class Exchange:
    """A request in flight and its measurements; times in seconds.

    `admitted_at` (epoch seconds) is when the look at the routes began that chose `target`.
    """

    id: str
    key: Key
    target: Target
    unit: str | None
    segment: str | None
    purpose: str
    admitted_at: float
    started: float
    status: int = 500
    ttft_s: float | None = None
    usage: dict[str, int] | None = None
    outcome: str | None = None
    # Of a stream: its pieces so far, and the seconds until the last one.
    pieces: int = 0
    last_s: float = 0.0

    def take(self, body: bytes, is_whole: bool, is_json: bool) -> None:
        """Measure a piece of the answer, the first, a later one, or the whole of it."""
        now_s = time.perf_counter() - self.started
        if is_whole:
            self.ttft_s = now_s
            answer = answer_of(body)
            self.usage, self.outcome = answer.get("usage"), outcome_of(answer, is_json)
        elif body:
            self.ttft_s = self.ttft_s or now_s
            self.pieces, self.last_s = self.pieces + 1, now_s
            self.outcome = streamed_outcome(body) or self.outcome

    def observation(self, gateway: str) -> dict[str, Any]:
        """Return the row for the ledger's table `observations`; `gateway` is this gateway's name."""
        usage = self.usage or {}
        return {
            "id": self.id,
            "at": self.admitted_at,
            "policy": self.target.policy,
            "digest": self.target.digest,
            "arm": self.target.arm,
            "unit": self.unit,
            "segment": self.segment,
            "key": self.key.hash,
            "status": self.status,
            "latency_s": time.perf_counter() - self.started,
            "ttft_s": self.ttft_s,
            "token_s": (self.last_s - (self.ttft_s or 0.0)) / (self.pieces - 1) if self.pieces > 1 else None,
            "outcome": self.outcome,
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "pieces": self.pieces or None,
            "route_version": self.target.route_version,
            "gateway": gateway,
            "purpose": self.purpose,
        }


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
            segment=segment_of(headers),
            purpose=purpose,
            admitted_at=admitted_at,
            started=started,
        )
        try:
            name = await self._hold(state, exchange, admit, receive)
            if name is None:
                ASKED.set(model)
                body["model"] = state.router.base_name
                await self._forward(exchange, body, scope, receive, send)
            else:
                body["model"] = name
                try:
                    await self._forward(exchange, body, scope, receive, send)
                finally:
                    state.residency.release(name)
        except GraftworkError as error:
            exchange.status = error.status
            raise
        finally:
            record(state, exchange)

    async def _hold(
        self, state: GatewayState, exchange: Exchange, admit: Admit, receive: Receive
    ) -> str | None:
        """Hold the target's adapter in the host tier; return its served name, or None for the base.

        A cold adapter may take a minute. After each such wait the request is admitted again and follows the
        routes as they are then: it never reaches a revision that was rolled back, retired, purged or
        quarantined meanwhile. The wait ends when the client leaves.
        """
        residency, priority = state.residency, INTERACTIVE if exchange.purpose == "user" else BACKGROUND
        while True:
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
    ) -> None:
        """Forward the request with the new body, mark the response and record its status and times."""
        request_id = (b"x-request-id", exchange.id.rpartition("-")[2].encode())
        replay, is_json = with_body(body, scope, receive, request_id), wants_json(body)
        revision = (exchange.target.name or "base").encode()

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-graftwork-revision", revision)]
            else:
                is_whole = not body.get("stream") and exchange.ttft_s is None and not message.get("more_body")
                exchange.take(message.get("body", b""), is_whole, is_json)
            await send(message)

        await self._app(scope, replay, observe)


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


def segment_of(headers: dict[str, str]) -> str | None:
    """Return the segment that a request names, or None."""
    segment = headers.get("x-graftwork-segment")
    if segment is not None and not SEGMENT_NAME.fullmatch(segment):
        raise Refused(
            400,
            f"x-graftwork-segment must be 1 to 64 letters, digits, '.', '-' or '_', not {segment[:64]!r}.",
        )
    return segment


def record(state: GatewayState, exchange: Exchange) -> None:
    """Spool a request's observation. A full disk is counted and logged, and never changes the answer."""
    try:
        state.spool.emit("observations", **exchange.observation(state.name))
    except OSError as error:
        UNOBSERVED.inc()
        log.warning("The observation of %s could not be spooled: %s", exchange.id, error)


def hash_unit(target: Target, unit: str) -> str:
    """Return a hash of the unit (24 hex digits): the ledger never stores the unit itself."""
    return hashlib.sha256(f"{target.policy}\0{unit}".encode()).hexdigest()[:24]


def answer_of(body: bytes) -> dict[str, Any]:
    """Return a response body with a `usage` object, or an empty mapping for any other."""
    if body.rfind(b'"usage":{') < 0:
        return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
