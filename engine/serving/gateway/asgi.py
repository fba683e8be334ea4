"""ASGI requests and responses: body, JSON, a client's disconnect, responses of the gateway itself."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any, TypeVar

from engine.errors import GraftworkError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
Done = TypeVar("Done")
MAX_BODY = 8 << 20
CLIENT_LEFT = 499


class Refused(GraftworkError):
    """A request that the gateway itself answers, with this HTTP status.

    `code` and `param` are those of OpenAI's errors; `headers` belong to the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Iterable[Header] = (),
    ):
        super().__init__(status, message, code, param, tuple(headers))
        self.status, self.code, self.param, self.headers = status, code, param, tuple(headers)

    def __str__(self) -> str:
        return str(self.args[1])


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


async def nothing() -> None:
    """Send nothing."""


async def answer(send: Send, status: int, body: bytes = b"", headers: Iterable[Header] = ()) -> None:
    """Send a whole response; a body is JSON."""
    told = [*headers]
    if body:
        told += [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"application/json"),
        ]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})
