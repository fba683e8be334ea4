"""Connections of a burst are taken up some at a time, not one in each turn of the event loop.

libuv accepts one connection of a listening socket in each turn of its loop (its pull request 3696). A turn
of a busy server takes some 7 ms, so that of 256 clients that come at once the last one waited for 1.8 s, and
so did everybody who came between them. Knows uvicorn's server, nothing of what is served.
"""

import socket
from collections.abc import Sequence
from functools import wraps
from typing import Any

# Handles of each listening socket; each takes up one connection in a turn. A connection that comes alone
# wakes all of them, for 5 us each: with 64 it costs twice as much as with one.
HANDLES = 8


def accept_bursts() -> None:
    """Have uvicorn's servers listen by `HANDLES` handles of each socket that they are given."""
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
