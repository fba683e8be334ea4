"""The fourth stage: vLLM answers. What it gets of the client's request, and what its answer tells.

A stream's usage is asked for on the gateway's account, and the piece that carries it is taken away when the
client did not ask. vLLM's errors are put into the form of the API that was called. Of a canary that fails
before its first byte nothing is sent: another call answers in its place.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import nullcontext
from functools import cache
from time import perf_counter

import orjson
from prometheus_client import Counter

from engine.serving.gateway.api_errors import translate
from engine.serving.gateway.asgi import App, Message, nothing
from engine.serving.gateway.call import Call, observe
from engine.serving.gateway.route_table import OF_CHOICES, Kind
from engine.serving.vllm_plugin.extra_args import ASKED

# Of a client's headers, vLLM gets only these: others choose a priority, a rank or a session.
FORWARDED = frozenset({b"accept", b"content-type", b"host", b"traceparent", b"tracestate", b"user-agent"})
ERROR, NOT_FOUND, SERVER_ERROR = 400, 404, 500
ANSWERS = Counter(
    "graftwork_answers", "Answers, and for what the gateway refused a request.", ["status", "reason"]
)


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
        if call.answer.is_stream and call.endpoint.path in OF_CHOICES:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if call.endpoint.path == "/v1/responses":
            body |= {"request_id": call.answer_id, "store": False}
    return orjson.dumps(body)


async def forward(call: Call, app: App) -> None:
    """Have vLLM's app answer; mark its answer, read it, and pass it on.

    `call.has_failed` is then whether this was a canary that failed: nothing of it was sent.
    """
    answer, is_generated = call.answer, call.endpoint.kind is Kind.GENERATE
    if is_generated and call.name is None:
        ASKED.set(call.model)
    body = body_for(call)
    relay = Relay(call, body, is_generated and call.is_canary)
    # The server writes into its scope, and a canary's may be needed again.
    scope = dict(call.scope)
    scope["headers"] = [
        *(header for header in scope["headers"] if header[0] in FORWARDED),
        (b"x-request-id", call.id.encode()),
        (b"x-vllm-priority", b"%d" % call.priority),
        (b"content-length", b"%d" % len(body)),
    ]
    answer.used = None
    is_followed = is_generated and call.size.samples > 1
    try:
        # vLLM forgets a sample at its end, and a client that leaves pays for those that have ended, too.
        with call.state.followed(call.id) if is_followed else nullcontext():
            await app(scope, relay.receive, relay.send)
    except Exception:
        if not relay.is_canary or answer.first_at is not None or answer.is_unanswered:
            raise
        answer.status, call.has_failed = SERVER_ERROR, True


class Relay:
    """Between vLLM's app and the client of one call: the body that goes in, the answer that comes out."""

    __slots__ = ("_answer", "_body", "_call", "_fault", "_kept", "_plain", "_send", "is_canary")

    def __init__(self, call: Call, body: bytes, is_canary: bool):
        self._call, self._answer, self._send, self.is_canary = call, call.answer, call.send, is_canary
        # What the app has not read yet.
        self._body: bytes | None = body
        # The beginning of an error, or of a canary's answer, until its first byte; an error's body.
        self._kept: Message | None = None
        self._fault = bytearray()
        # What a piece has of which nothing needs to be read, once the answer has begun.
        self._plain: bytes | None = None

    async def receive(self) -> Message:
        """Return the body, and then what the client's connection tells."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._call.receive()
        if message["type"] == "http.disconnect":
            self._answer.has_left = True
            if self._answer.used is None:
                # The engine will stop it.
                self._answer.used = self._call.state.counted(self._call.id)
        return message

    # A plain function: a coroutine for each piece of a stream costs as much as the rest of it.
    def send(self, message: Message) -> Awaitable[None]:
        """Take the beginning of the answer or a piece of it, and pass it on."""
        if self._plain is not None and self._plain in message.get("body", b""):
            # Most pieces of a stream: what is done for each of them costs.
            answer = self._answer
            answer.last_at = perf_counter()
            answer.pieces += 1
            return self._send(message)
        if message["type"] != "http.response.start":
            return self._take(message)
        self._answer.status = message["status"]
        if self.is_canary or self._answer.status >= ERROR:
            self._kept = message
            return nothing()
        return begin(self._call, message)

    def _take(self, message: Message) -> Awaitable[None]:
        """Read a piece, and send what of it is the client's."""
        answer, piece, has_more = self._answer, message.get("body", b""), bool(message.get("more_body"))
        if self._kept is not None and answer.status >= ERROR:
            self._fault += piece
            return nothing() if has_more else self._fail(self._kept)
        told = answer.read(piece, not has_more)
        if not self._call.wants_usage:
            message["body"] = told
            if piece and has_more and not told:
                return nothing()
            piece = told
        if answer.is_unanswered:
            # vLLM ends the answer to a client that has left with 200 and nothing in it.
            return nothing()
        if piece:
            answer.time()
        start, self._kept = self._kept, None
        if start is not None:
            self._call.has_failed = is_fault(answer.fault or answer.status)
        if self._call.has_failed:
            return nothing()
        if not has_more:
            self._end()
        if start is not None:
            return self._begin_with(start, message)
        if answer.pieces:
            self._plain = answer.plain
        return self._send(message)

    def _end(self) -> None:
        """Observe the call before the last of its answer is sent, so that no kill comes in between."""
        if self._call.endpoint.kind is Kind.GENERATE:
            observe(self._call)

    async def _fail(self, start: Message) -> None:
        """Send an error of vLLM's in the API's form; nothing was generated for the client."""
        self._kept = None
        answer, call = self._answer, self._call
        answer.used = (0, 0)
        if answer.is_unanswered:
            return
        answer.time()
        if self.is_canary and is_fault(answer.status):
            call.has_failed = True
            return
        told = translate(answer.status, bytes(self._fault), call.endpoint.path)
        headers = [header for header in start.get("headers", ()) if header[0].lower() != b"content-length"]
        start["headers"] = [*headers, (b"content-length", b"%d" % len(told))]
        self._end()
        await self._begin_with(start, {"type": "http.response.body", "body": told})

    async def _begin_with(self, start: Message, message: Message) -> None:
        await begin(self._call, start)
        await self._send(message)


def begin(call: Call, start: Message) -> Awaitable[None]:
    """Send the beginning of the call's answer, with our headers."""
    ours = [(b"x-request-id", call.id.encode())]
    if call.endpoint.kind is Kind.GENERATE:
        revision = (call.target.name or "base").encode()
        ours += [(b"x-graftwork-revision", revision), *call.state.meter.headers(call)]
    start["headers"] = [*start.get("headers", ()), *ours]
    answers_with(start["status"], "").inc()
    return begin_stream(call, start) if call.answer.is_stream else call.send(start)


async def begin_stream(call: Call, start: Message) -> None:
    """Send the beginning of a stream; tell the meter once it has left."""
    await call.send(start)
    # `JoinedWrites` sends it with the first piece, or in the next turn of the loop, by a call queued before
    # this one. If the gateway is killed before that, the proxy asks another one, which bills the stream.
    asyncio.get_running_loop().call_soon(call.state.meter.note_beginning, call)


def is_fault(status: int) -> bool:
    """Return whether a canary's status is no fault of its user: an error, or a name that vLLM cannot find."""
    return status >= SERVER_ERROR or status == NOT_FOUND
