"""Forward a request to vLLM: what it gets of the client's request, and what its answer says of usage.

A stream's usage is asked for on the gateway's account, and the piece that carries it is taken away when the
client did not ask. vLLM's errors are put into the form of the API that was called.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.serving.gateway.answers import AnswerReader, Used, wants_json
from engine.serving.gateway.api_errors import translate
from engine.serving.gateway.asgi import App, Header, Message, Receive, Send, nothing, with_body

# Of a client's headers, vLLM gets only these: others choose a priority, a rank or a session.
FORWARDED = frozenset({b"accept", b"content-type", b"host", b"traceparent", b"tracestate", b"user-agent"})
# Endpoints whose streams carry usage when `stream_options` ask; the others' always do.
ASKED_FOR_USAGE = frozenset({"/v1/completions", "/v1/chat/completions"})
ERROR = 400
Counted = Callable[[str], Used | None]


def uncounted(_request_id: str) -> None:
    """Say that what a request has used is not known."""
    return


@dataclass
class ForwardedCall:
    """A request to forward and what its answer told; `used` is None while its tokens are not known.

    `id` is the request's id without prefix; `counted` asks the engine what a request has used so far.
    """

    id: str
    path: str
    priority: int
    answer: AnswerReader
    wants_usage: bool
    counted: Counted = uncounted
    used: Used | None = (0, 0)

    @staticmethod
    def of(
        request_id: str,
        path: str,
        body: dict[str, Any],
        priority: int = 0,
        counted: Counted = uncounted,
        choices: int = 1,
    ) -> "ForwardedCall":
        """Return the call of a request, and have a stream's `body` ask for usage."""
        is_stream = body.get("stream") is True
        options = body.get("stream_options") or {}
        if is_stream and path in ASKED_FOR_USAGE:
            body["stream_options"] = {**options, "include_usage": True}
        wants = path not in ASKED_FOR_USAGE or bool(options.get("include_usage"))
        answer = AnswerReader(path, is_stream, wants_json(body), choices)
        return ForwardedCall(request_id, path, priority, answer, wants, counted)

    def again(self) -> "ForwardedCall":
        """Return the call as it was before any answer."""
        return replace(self, answer=self.answer.again(), used=(0, 0))

    def left(self) -> None:
        """Take what the request has used until now: its client has left, and the engine will stop it."""
        if self.answer.used is None:
            self.used = self.counted(self.id)

    def read(self, piece: bytes, is_last: bool) -> bytes:
        """Read a piece of the answer; return what of it the client asked for."""
        kept = self.answer.read(piece, is_last)
        if self.answer.used is not None:
            self.used = self.answer.used
        return piece if self.wants_usage else kept


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
    call.used, answer = None, call.answer

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
        else:
            piece = message.get("body", b"")
            # Most pieces of a stream: what is done for each of them costs.
            if answer.plain is not None and answer.plain in piece:
                return send(message)
            has_more = bool(message.get("more_body"))
            message["body"] = call.read(piece, not has_more)
            if piece and has_more and not message["body"]:
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
