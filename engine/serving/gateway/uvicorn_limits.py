"""Limits of a connection before its request reaches the gateway: uvicorn has none of its own.

uvicorn 0.54 buffers headers of any size, and waits for ever for a first request or the rest of its headers.
"""

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Request line and headers of a request, in bytes, and how long a connection may take to send them.
MOST_HEADERS = 64 << 10
HEADERS_S = 20.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def limit_connections() -> None:
    """Have servers that are started from now on use `LimitedProtocol`. Idempotent."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol that closes a connection whose headers are too large or too slow."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._reads_headers = True
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and refuse headers that go on and on."""
        super().data_received(data)
        if self._reads_headers and not self.transport.is_closing():
            self._received += len(data)
            if self._received > MOST_HEADERS:
                self._refuse()
            elif self._deadline is None:
                self._arm()

    def on_message_begin(self) -> None:
        """Begin to count the headers of a request."""
        super().on_message_begin()
        self._reads_headers, self._received = True, 0

    def on_headers_complete(self) -> None:
        """Start the request, unless all of its headers came at once and are too large."""
        self._reads_headers = False
        self._disarm()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MOST_HEADERS:
            # The parser passes it on to `send_400_response`.
            raise ValueError("The headers are too large.")
        super().on_headers_complete()

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
