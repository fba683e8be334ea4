"""ASGI requests and responses: body, JSON, a client's disconnect, errors in the format of OpenAI's API."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import orjson

from engine.errors import Ambiguous, Busy, GraftworkError, NotFound

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Done = TypeVar("Done")
MAX_BODY = 8 << 20
CLIENT_LEFT = 499


class Refused(GraftworkError):
    """A request that the gateway itself answers, with this HTTP status."""

    def __init__(self, status: int, message: str, allowed: frozenset[str] = frozenset()):
        super().__init__(status, message, allowed)
        self.status, self.allowed = status, allowed

    def __str__(self) -> str:
        return str(self.args[1])


async def read_body(receive: Receive) -> bytes:
    """Return the whole request body.

    Raises `Refused`: 413 over 8 MiB, 400 when the client disconnects first.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The client disconnected before it had sent the whole request.")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise Refused(413, f"The request body is larger than the limit of {MAX_BODY >> 20} MiB.")
        if not message.get("more_body"):
            return b"".join(chunks)


async def unless_left(
    receive: Receive, work: Coroutine[Any, Any, Done], give_back: Callable[[Done], object]
) -> Done:
    """Return the result of `work`; cancel it and raise `Refused` (499) when the client disconnects first.

    `give_back` receives a result that nobody takes: of work that ends while this call is cancelled.
    """
    taken = False
    working: asyncio.Task[Done] = asyncio.create_task(work)
    # The body has been read, so the next message can only be the client's disconnect.
    left: asyncio.Future[Message] = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            taken = True
            return working.result()
        raise Refused(CLIENT_LEFT, "The client disconnected before the adapter was loaded.")
    finally:
        left.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
        if not taken and not working.cancelled() and working.exception() is None:
            give_back(working.result())


def parse(raw: bytes) -> dict[str, Any]:
    """Return a request body as a JSON object. Raises `Refused` (400) for anything else."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused(400, f"The request body must be a JSON object, not a {type(body).__name__}.")
    return body


def with_body(body: dict[str, Any], scope: Any, receive: Receive, *headers: tuple[bytes, bytes]) -> Receive:
    """Return a `receive` that gives this body first; sets the scope's content length and `headers`."""
    raw, sent = orjson.dumps(body), False
    headers = (*headers, (b"content-length", str(len(raw)).encode()))
    replaced = {name for name, _ in headers}
    scope["headers"] = [*(header for header in scope["headers"] if header[0] not in replaced), *headers]

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


async def send_error(send: Send, error: GraftworkError) -> None:
    """Send an error response in the format of OpenAI's API."""
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, Busy):
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    elif isinstance(error, Refused) and error.allowed:
        headers.append((b"allow", ", ".join(sorted(error.allowed)).encode()))
    fault: dict[str, Any] = {"message": str(error), "type": type(error).__name__, "code": error.status}
    if isinstance(error, NotFound):
        fault["nearest"] = error.nearest
    elif isinstance(error, Ambiguous):
        fault["candidates"] = error.candidates
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps({"error": fault})})
