"""Accept several connections in each iteration of uvicorn's event loop.

libuv accepts one connection per listening socket and loop iteration (libuv pull request 3696). An iteration
of a busy server takes about 7 ms, so in a burst of 256 clients the last one waited 1.8 s for its connection.
"""

import socket
from collections.abc import Sequence
from functools import wraps
from typing import Any

# Handles per listening socket; each accepts one connection per iteration. A single connection wakes all of
# them at 5 us each: with 64 handles it costs twice as much as with one.
HANDLES = 8


def accept_bursts() -> None:
    """Make uvicorn's servers listen with `HANDLES` handles on each of their sockets. Idempotent."""
    import uvicorn

    plain = uvicorn.Server.startup
    if getattr(plain, "accepts_bursts", False):
        return

    @wraps(plain)
    async def startup(self: Any, sockets: Sequence[socket.socket] | None = None) -> None:
        handles = None
        if sockets is not None:
            handles = [each for one in sockets for each in (one, *(one.dup() for _ in range(HANDLES - 1)))]
        await plain(self, handles)

    startup.accepts_bursts = True  # type: ignore[attr-defined]
    uvicorn.Server.startup = startup  # type: ignore[assignment, method-assign]
