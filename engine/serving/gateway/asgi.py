"""ASGI requests and responses: body, JSON, responses of the gateway itself."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from engine.errors import GraftworkError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
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
