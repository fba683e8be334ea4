"""The fourth stage: vLLM answers. What it gets of the client's request, and what its answer tells.

A stream's usage is asked for on the gateway's account, and the piece that carries it is taken away when the
client did not ask. vLLM's errors are put into the form of the API that was called. Of a canary that fails
before its first byte nothing is sent: another call answers in its place.
"""

from collections.abc import Awaitable
from contextvars import ContextVar
from functools import cache
from time import perf_counter
from typing import Any

import orjson
from prometheus_client import Counter

from engine.serving.gateway.api_errors import translate
from engine.serving.gateway.asgi import App, Message, nothing
from engine.serving.gateway.call import Call
from engine.serving.gateway.reading import ASKED_FOR_USAGE
from engine.serving.gateway.route_table import Kind

# Of a client's headers, vLLM gets only these: others choose a priority, a rank or a session.
FORWARDED = frozenset({b"accept", b"content-type", b"host", b"traceparent", b"tracestate", b"user-agent"})
ERROR, NOT_FOUND, SERVER_ERROR = 400, 404, 500
ANSWERS = Counter(
    "graftwork_answers", "Answers, and for what the gateway refused a request.", ["status", "reason"]
)
# The `model` of a request that the base answers, for its answer to carry.
ASKED: ContextVar[str | None] = ContextVar("asked", default=None)


@cache
def answers_with(status: int, reason: str) -> Counter:
    """Return the counter of these answers. Both labels are of few words: no client makes one."""
    return ANSWERS.labels(status, reason)


def body_for(call: Call) -> bytes:
    """Return the body that vLLM gets: the client's, with the fields that the gateway alone sets."""
    if call.endpoint.fields is None:
        return call.raw
    body = call.body
    if call.endpoint.kind is Kind.GENERATE:
        body["model"] = call.name or call.state.router.base_name
        if not call.state.settings.shared_prefix_cache:
            # By the time to the first token one tenant could guess another's prompts.
            body["cache_salt"] = call.state.router.keyed_hash("prefix cache", call.tenant.name)
        if call.answer.is_stream and call.endpoint.path in ASKED_FOR_USAGE:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if call.endpoint.path == "/v1/responses":
            body |= {"request_id": call.answer_id, "store": False}
    return orjson.dumps(body)


async def forward(call: Call, app: App) -> None:
    """Have vLLM's app answer; mark its answer, read it, and pass it on.

    `call.has_failed` is then whether this was a canary that failed: nothing of it was sent.
    """
    answer, send, counted = call.answer, call.send, call.state.counted
    wants_usage = call.wants_usage
    body = body_for(call)
    is_canary = call.endpoint.kind is Kind.GENERATE and call.is_canary
    if call.endpoint.kind is Kind.GENERATE and call.name is None:
        ASKED.set(call.model)
    scope = dict(call.scope)
    scope["headers"] = [
        *(header for header in scope["headers"] if header[0] in FORWARDED),
        (b"x-request-id", call.id.encode()),
        (b"x-vllm-priority", b"%d" % call.priority),
        (b"content-length", b"%d" % len(body)),
    ]
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            message = await call.receive()
            if message["type"] == "http.disconnect":
                answer.has_left = True
                if answer.used is None:
                    # The engine will stop it.
                    answer.used = counted(call.id)
            return message
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    # The beginning of an error, or of a canary's answer, until its first byte.
    kept: Message | None = None
    fault = bytearray()
    # What a piece has of which nothing needs to be read, once the answer has begun.
    plain: bytes | None = None

    # A plain function: a coroutine for each piece of a stream costs as much as the rest of it.
    def relay(message: Message) -> Awaitable[None]:
        nonlocal kept, plain
        if plain is not None and plain in message.get("body", b""):
            # Most pieces of a stream: what is done for each of them costs.
            answer.last_at = perf_counter()
            answer.pieces += 1
            return send(message)
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            if is_canary or answer.status >= ERROR:
                kept = message
                return nothing()
            return begin(call, message)
        piece = message.get("body", b"")
        if kept is not None and answer.status >= ERROR:
            fault.extend(piece)
            if message.get("more_body"):
                return nothing()
            start, kept = kept, None
            return fail(start)
        has_more = bool(message.get("more_body"))
        told = answer.read(piece, not has_more)
        if not wants_usage:
            message["body"] = told
            if piece and has_more and not told:
                return nothing()
            piece = told
        if answer.is_unanswered:
            # vLLM ends the answer to a client that has left with 200 and nothing in it.
            return nothing()
        if piece:
            answer.time()
        if call.has_failed:
            return nothing()
        if kept is not None:
            start, kept = kept, None
            if is_fault(answer.fault or answer.status):
                call.has_failed = True
                return nothing()
            return both(start, message)
        if answer.pieces:
            plain = answer.plain
        return send(message)

    async def fail(start: Message) -> None:
        """Send an error of vLLM's in the API's form; nothing was generated for the client."""
        answer.used = (0, 0)
        if answer.is_unanswered:
            return
        answer.time()
        if is_canary and is_fault(answer.status):
            call.has_failed = True
            return
        told = translate(answer.status, bytes(fault), call.endpoint.path)
        headers = [header for header in start.get("headers", ()) if header[0].lower() != b"content-length"]
        start["headers"] = [*headers, (b"content-length", b"%d" % len(told))]
        await both(start, {"type": "http.response.body", "body": told})

    async def both(start: Message, message: Message) -> None:
        await begin(call, start)
        await send(message)

    answer.used = None
    try:
        await app(scope, receive, relay)
    except Exception:
        if not is_canary or answer.first_at is not None or answer.is_unanswered:
            raise
        answer.status, call.has_failed = SERVER_ERROR, True


def begin(call: Call, start: Message) -> Awaitable[None]:
    """Send the beginning of the call's answer, with our headers."""
    ours = [(b"x-request-id", call.id.encode())]
    if call.endpoint.kind is Kind.GENERATE:
        revision = (call.target.name or "base").encode()
        ours += [(b"x-graftwork-revision", revision), *call.state.meter.headers(call)]
    start["headers"] = [*start.get("headers", ()), *ours]
    answers_with(start["status"], "").inc()
    return call.send(start)


def is_fault(status: int) -> bool:
    """Return whether a canary's status is no fault of its user: an error, or a name that vLLM cannot find."""
    return status >= SERVER_ERROR or status == NOT_FOUND


def answer_as_asked(models: Any) -> None:
    """Make answers of the base carry the `model` of the request, such as a policy without a champion.

    `models` is vLLM's `OpenAIServingModels`, which writes the base's own name. Bound: 0.32.0. Goes when vLLM
    answers with the request's `model`.
    """
    stock = models.model_name

    def model_name(lora_request: Any = None) -> str:
        return str(stock(lora_request) if lora_request else ASKED.get() or stock())

    models.model_name = model_name
