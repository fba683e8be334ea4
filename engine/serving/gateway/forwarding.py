"""Forward a request to vLLM: what it gets of the client's request, and what its answer says of usage.

A stream's usage is asked for on the gateway's account, and the piece that carries it is taken away when the
client did not ask. vLLM's errors are put into the form of the API that was called.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from engine.serving.gateway.api_errors import translate
from engine.serving.gateway.asgi import App, Header, Message, Receive, Send, nothing, with_body

# Of a client's headers, vLLM gets only these: others choose a priority, a rank or a session.
FORWARDED = frozenset({b"accept", b"content-type", b"host", b"traceparent", b"tracestate", b"user-agent"})
# Endpoints whose streams carry usage when `stream_options` ask; the others' always do.
ASKED_FOR_USAGE = frozenset({"/v1/completions", "/v1/chat/completions"})
HAS_USAGE = b'"usage":{'
USAGE = re.compile(rb'"usage":(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
ERROR = 400
# (prompt, completion) tokens.
Used = tuple[int, int]
Counted = Callable[[str], Used | None]


def uncounted(_request_id: str) -> None:
    """Say that what a request has used is not known."""
    return


@dataclass
class ForwardedCall:
    """A request to forward and the tokens that it used; `used` is None until they are known.

    `id` is the request's id without prefix; `counted` asks the engine what a request has used so far.
    """

    id: str
    path: str
    priority: int
    is_stream: bool
    wants_usage: bool
    counted: Counted = uncounted
    used: Used | None = (0, 0)

    @staticmethod
    def of(
        request_id: str, path: str, body: dict[str, Any], priority: int, counted: Counted = uncounted
    ) -> "ForwardedCall":
        """Return the call of a request, and have a stream's `body` ask for usage."""
        is_stream = body.get("stream") is True
        options = body.get("stream_options") or {}
        if is_stream and path in ASKED_FOR_USAGE:
            body["stream_options"] = {**options, "include_usage": True}
        wants = path not in ASKED_FOR_USAGE or bool(options.get("include_usage"))
        return ForwardedCall(request_id, path, priority, is_stream, wants, counted)

    def left(self) -> None:
        """Take what the request has used until now: its client has left, and the engine will stop it."""
        if self.used is None:
            self.used = self.counted(self.id)

    def read_usage(self, piece: bytes) -> None:
        """Take the usage that a piece of the answer, or the whole of it, tells."""
        for match in USAGE.finditer(piece):
            told = orjson.loads(match.group(1))
            before = self.used or (0, 0)
            prompt = told.get("prompt_tokens", told.get("input_tokens"))
            completion = told.get("completion_tokens", told.get("output_tokens"))
            self.used = (
                before[0] if prompt is None else prompt, before[1] if completion is None else completion
            )  # fmt: skip


async def forward(
    app: App, call: ForwardedCall, body: bytes, scope: Any, receive: Receive, send: Send
) -> None:
    """Run vLLM's app on the request with this body; `call.used` is then what it used, or None."""
    ours: tuple[Header, ...] = (
        (b"x-request-id", call.id.encode()),
        (b"x-vllm-priority", str(call.priority).encode()),
    )
    scope["headers"] = [header for header in scope["headers"] if header[0] in FORWARDED]
    replay = with_body(body, scope, receive, *ours, left=call.left)
    held: list[Message] = []
    fault = bytearray()
    call.used = None

    # A plain function: a coroutine for each piece of a stream costs as much as the rest of it.
    def watched(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            if message["status"] >= ERROR:
                held.append(message)
                return nothing()
        elif held:
            fault.extend(message.get("body", b""))
            if message.get("more_body"):
                return nothing()
            return _send_fault(call, held.pop(), bytes(fault), send)
        elif HAS_USAGE in message.get("body", b"") and _measure(call, message):
            return nothing()
        return send(message)

    await app(scope, replay, watched)


async def _send_fault(call: ForwardedCall, start: Message, fault: bytes, send: Send) -> None:
    """Send an error of vLLM's in the API's form. Nothing was generated for the client."""
    call.used = (0, 0)
    told = translate(start["status"], fault, call.path)
    kept = [header for header in start.get("headers", ()) if header[0].lower() != b"content-length"]
    start["headers"] = [*kept, (b"content-length", str(len(told)).encode())]
    await send(start)
    await send({"type": "http.response.body", "body": told})


def _measure(call: ForwardedCall, message: Message) -> bool:
    """Read the usage of a piece of an answer, and take away what the client did not ask for.

    Return whether nothing is left of it.
    """
    piece = message["body"]
    call.read_usage(piece)
    if not call.is_stream or call.wants_usage:
        return False
    kept = [event for event in piece.splitlines(keepends=True) if not _is_extra(event)]
    message["body"] = b"".join(kept).lstrip(b"\n")
    return not message["body"] and bool(message.get("more_body"))


def _is_extra(event: bytes) -> bool:
    """Return whether an event is the one that only carries usage: it has no choices."""
    return HAS_USAGE in event and b'"choices":[]' in event
