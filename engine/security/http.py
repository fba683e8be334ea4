"""What stands in front of a service: limits of a connection, a Host allow-list and the key.

uvicorn 0.54 buffers headers and trailers of any size, and waits for ever for a first request, the rest of its
headers, the rest of a body whose request is answered already, or a client that reads no answer. And it sends
the head of an answer before its body: a process that is killed in between leaves half an answer, for which no
proxy asks another one.

A Host allow-list stops DNS rebinding: a web page whose name resolves to 127.0.0.1 still sends its own name.
"""

import asyncio
import hmac
import math
from typing import Any

import uvicorn.config
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.settings.services import Listener

# What a supervisor or a load balancer asks without a key.
HEALTH = "/health"
# Request line and headers of a request, in bytes, and how long a connection may take to send them.
MOST_HEADERS = 64 << 10
HEADERS_S = 20.0
# How long who still sends a body has to read its answer.
LINGER_S = 5.0
# How long a client may take nothing of an answer that waits for it.
STALLED_S = 60.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def limit_connections() -> None:
    """Have servers that are started from now on use `LimitedProtocol`. Idempotent."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"


class JoinedWrites:
    """The transport for one answer: its head goes out in one write with the body, if that follows at once."""

    __slots__ = ("_head", "_is_begun", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop, self._head, self._is_begun = transport, loop, b"", False

    def write(self, data: bytes) -> None:
        """Write; what comes first, with what follows it in this turn of the event loop."""
        if not self._is_begun:
            self._is_begun, self._head = True, data
            self._loop.call_soon(self._flush)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def _flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether nothing more is sent."""
        return self._transport.is_closing()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol that closes a connection whose headers are too large or too slow."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._reads_headers = True
        # Bytes of headers or trailers, but for the piece in which the request began or its body went on.
        self._beside_body = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        # The request that is answered and has not been sent whole.
        self._unsent: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait."""
        self._disarm()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read its answer; what is computed for it has a place."""
        super().pause_writing()
        self._await_reading(math.inf)

    def resume_writing(self) -> None:
        """Stop to wait: it reads."""
        self._end_stall()
        super().resume_writing()

    def _await_reading(self, unread: float) -> None:
        """Look later whether the client has taken some of the `unread` bytes; nothing is added meanwhile."""
        left = self.transport.get_write_buffer_size()
        if left < unread:
            self._stall = self.loop.call_later(STALLED_S, self._await_reading, left)
        else:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and refuse headers that go on and on."""
        self._beside_body += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._beside_body > MOST_HEADERS:
            self._refuse()
        elif self._reads_headers and self._deadline is None:
            self._arm()

    def on_message_begin(self) -> None:
        """Begin to count the headers of a request."""
        super().on_message_begin()
        self._reads_headers, self._beside_body = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; refuse trailers, which nothing reads and which may go on for ever."""
        if not self._reads_headers:
            raise ValueError("Trailers are not taken.")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._beside_body = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """End the connection of a client that has its answer and still sends the request."""
        cycle = self.cycle
        super().on_response_complete()
        if cycle is not None and cycle.more_body and not self.transport.is_closing():
            # The client may read the answer first: a close now would reset the connection.
            self._unsent = cycle
            self.loop.call_later(LINGER_S, self._end_unless_sent, cycle)

    def on_message_complete(self) -> None:
        """Note that the request is here; uvicorn notes it only of one that is not answered yet."""
        self._unsent = None
        super().on_message_complete()

    def _end_unless_sent(self, cycle: Any) -> None:
        if self._unsent is cycle:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Start the request, unless all of its headers came at once and are too large."""
        self._reads_headers = False
        self._disarm()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MOST_HEADERS:
            # The parser passes it on to `send_400_response`.
            raise ValueError("The headers are too large.")
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = JoinedWrites(self.transport, self.loop)  # type: ignore[assignment]

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed, or one with too large headers."""
        if self.headers and sum(len(name) + len(value) for name, value in self.headers) > MOST_HEADERS:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self.transport.write(TOO_LARGE)
        self.transport.close()

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self.timeout_keep_alive_handler)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class KeyRequired:
    """Refuse every request without `Authorization: Bearer KEY`, except for its health."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] == "lifespan" or scope["path"] == HEALTH or self._knows(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        sentence = "This call needs the header `Authorization: Bearer KEY` with the service's key."
        body = {"kind": "Unauthorized", "error": sentence}
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and same(credential.strip(), self.key)


def same(given: str, wanted: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())


class WithoutCookies:
    """Drop cookies: nothing here reads them, and FastAPI parses them for every route.

    Python's parser takes time by the square of their length (CVE-2024-7592): seconds for 30 KB.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without them."""
        if scope["type"] == "http":
            scope["headers"] = [header for header in scope["headers"] if header[0] != b"cookie"]
        await self.app(scope, receive, send)


def trusted(app: ASGIApp, listener: Listener) -> ASGIApp:
    """Return the app behind a Host allow-list: 400 for a name that is not the listener's."""
    return TrustedHostMiddleware(WithoutCookies(app), listener.names, www_redirect=False)


def guarded(app: ASGIApp, listener: Listener, key: str) -> ASGIApp:
    """Return the app behind a Host allow-list and a key."""
    return trusted(KeyRequired(app, key), listener)


def server_options(listener: Listener) -> dict[str, Any]:
    """Return the address and TLS options of `uvicorn.Config`, and the limits of a connection."""
    return {
        "host": str(listener.listen),
        "port": listener.port,
        "http": LimitedProtocol,
        **dict(zip(("ssl_certfile", "ssl_keyfile"), listener.tls or (), strict=False)),
    }
