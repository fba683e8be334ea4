"""Looks at the catalog's changes, and keeps the event loop from waiting for a catalog on a server.

SQLite answers in microseconds, so a gateway looks at each request. A server is looked at by a thread, five
times a second while there are requests; on the loop only what is kept is used, and what has to be read is
read by threads. A server that says nothing then delays those requests alone that need something new of it.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from engine.catalog.catalog import Catalog
from engine.catalog.changes import POLL_S
from engine.catalog.waits import ANSWER_S, limit_waits
from engine.errors import ServiceError

# How long a request waits for the look that is due.
LOOK_S = 0.5
# Threads that read rows; together with the one that looks fewer than the catalog has connections.
THREADS = 8
T = TypeVar("T")


class Unread(Exception):
    """Something has to be read, which is not done on the event loop."""


class _Here(threading.local):
    reads = True


class CatalogWatch:
    """The looks of one router at its catalog. Thread-safe; `ask` is for one event loop."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Callable[[], float],
        take: Callable[[int, set[str | None] | None], object],
    ):
        """`take` is told of each look that found something: `seen`, and what changed, as `changes.since`."""
        self._changes, self._is_file = catalog.changes, catalog.is_file
        self._clock, self._take = clock, take
        # Of the whole catalog, and the number of the newest change that was read.
        self._version: int | None = None
        self._newest = 0
        # How many looks found something. What is read is as new as the number from before it was read.
        self.seen = 0
        # Until when it is known whether the catalog can be read, and the newest time that it could be.
        self.looked_at = self.read_at = clock()
        # The newest look failed, or has taken too long already.
        self.fails = False
        self._looking, self._here = threading.Lock(), _Here()
        limit = (ANSWER_S,)
        self._looks = ThreadPoolExecutor(1, "graftwork-look", limit_waits, limit)
        self._reads = ThreadPoolExecutor(THREADS, "graftwork-read", limit_waits, limit)
        self._under_way: asyncio.Future[None] | None = None

    @property
    def may_read(self) -> bool:
        """Return whether this thread may wait for the catalog now."""
        return self._here.reads

    def refuse_on_loop(self) -> None:
        """Raise `Unread` where this thread may not wait for the catalog."""
        if not self._here.reads:
            raise Unread

    def look(self) -> None:
        """Check for changes. Takes microseconds with SQLite, so every request does it.

        Raises `ServiceError` when the catalog could never be read.
        """
        if not self._here.reads:
            if self._version is None:
                raise Unread
            return
        with self._looking:
            try:
                version = self._changes.version()
                if version != self._version:
                    self._newest, names = self._changes.since(self._newest)
                    if names is None or names:
                        self.seen += 1
                        self._take(self.seen, names)
                    self._version = version
                self.read_at, self.fails = self._clock() - self._changes.age(), False
            except ServiceError:
                self.fails = True
                if self._version is None:
                    raise
            finally:
                self.looked_at = self._clock()

    async def ask(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, which asks the router; a thread waits for a server in its place."""
        if self._is_file:
            return call()
        await self._look_in_time()
        self._here.reads = False
        try:
            return call()
        except Unread:
            pass
        finally:
            self._here.reads = True
        return await self.in_thread(call)

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Return what a call returns that waits for the catalog."""
        # Its log lines have the request's id.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._reads, context.run, call, *args)

    async def _look_in_time(self) -> None:
        """Have a thread look when the newest look is too old. Nobody waits for a server that fails."""
        if self._under_way is None:
            if self._clock() - self.looked_at < POLL_S:
                return
            self._under_way = asyncio.get_running_loop().run_in_executor(self._looks, self.look)
            self._under_way.add_done_callback(self._looked)
        if not self.fails:
            await asyncio.wait([self._under_way], timeout=LOOK_S)
        if self._under_way is not None:
            self.fails, self.looked_at = True, self._clock()

    def _looked(self, look: "asyncio.Future[None]") -> None:
        self._under_way = None
        # An error was counted, and whoever needs the catalog gets it from its own look.
        if not look.cancelled():
            look.exception()
