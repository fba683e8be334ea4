"""What a gateway knows of the catalog: rows that are kept until a change to them is noticed.

SQLite answers in microseconds, so a gateway looks for changes at each request. A server is looked at by a
thread, five times a second while there are requests; on the event loop only what is kept is used, and what
has to be read is read by threads. A server that says nothing then delays those requests alone that need
something new of it.
"""

import asyncio
import contextvars
import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from engine.catalog.catalog import Catalog
from engine.catalog.waits import ANSWER_S, limit_waits
from engine.errors import Conflict, NotFound, ServiceError

# Between two looks at a server.
POLL_S = 0.2
# How long a request waits for the look that is due.
LOOK_S = 0.5
# Threads that read rows; together with the one that looks fewer than the catalog has connections.
THREADS = 8
# Names and keys that are known not to exist, so that asking again reads nothing.
ABSENT_ROWS = 4096
# Least rows to cache, about 2 kB each.
LEAST_ROWS = 8192
UNREADABLE = "The catalog cannot be read. Try again."
# Both copies of the header of the index that connections share of a write-ahead log: each commit changes it
# (https://www.sqlite.org/walformat.html, 2.2). Whatever else may change there costs a query, no more.
HEADER_BYTES = 96
T = TypeVar("T")
log = logging.getLogger("graftwork.routing")


class RowCache:
    """Catalog rows, each with the number of the newest look at the catalog before it was read. LRU eviction.

    Thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._rows: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        # Since when a changed row could not be read again.
        self._unread: dict[Hashable, float] = {}
        # The newest look that found a change of each policy (None: keys), and a lower bound for those that
        # are dropped from here.
        self._changed: OrderedDict[str | None, int] = OrderedDict()
        self._all_changed = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    def get(self, key: Hashable) -> tuple[int, Any] | None:
        """Return (look when read, row), or None when the row is not cached."""
        with self._lock:
            kept = self._rows.get(key)
            if kept is not None:
                self._rows.move_to_end(key)
            return kept

    def put(self, key: Hashable, seen: int, value: Any) -> None:
        """Cache a row that was read when `seen` was the newest look."""
        with self._lock:
            self._rows[key] = seen, value
            self._rows.move_to_end(key)
            self._unread.pop(key, None)
            if len(self._rows) > self._most:
                self.drop(next(iter(self._rows)))

    def drop(self, key: Hashable) -> None:
        """Remove a row, if it is cached."""
        with self._lock:
            self._rows.pop(key, None)
            self._unread.pop(key, None)

    def fail(self, key: Hashable, kept: tuple[int, Any], now: float) -> None:
        """Record that a cached row, which `get` returned, could not be read again; the first time counts.

        Nothing is recorded where somebody else has read it meanwhile.
        """
        with self._lock:
            if self._rows.get(key) is kept:
                self._unread.setdefault(key, now)

    def unread_since(self, key: Hashable) -> float | None:
        """Return since when a changed row has been unreadable (the caller's clock), or None."""
        return self._unread.get(key)

    def is_fresh(self, whose: str | None, seen: int) -> bool:
        """Return whether nothing of this policy (None: the keys) has changed since look `seen`."""
        return seen >= max(self._all_changed, self._changed.get(whose, 0))

    def note(self, look: int, names: set[str | None] | None) -> None:
        """Mark rows of these policies as stale when they were read before this look; None: drop every row."""
        with self._lock:
            if names is None:
                self._rows.clear()
                self._unread.clear()
                self._changed.clear()
                self._all_changed = look
                return
            for name in names:
                self._changed[name] = look
                self._changed.move_to_end(name)
            while len(self._changed) > self._most:
                self._all_changed = max(self._all_changed, self._changed.popitem(last=False)[1])


class CommitWatch:
    """Whether somebody has committed to a SQLite database. For one thread at a time."""

    def __init__(self, path: str):
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._index_path = Path(f"{path}-shm")
        self._index: int | None = None
        self._header = b""
        self._commits = -1

    def close(self) -> None:
        """Close the connection."""
        if self._index is not None:
            os.close(self._index)
        self._index, self._header = None, b""
        self.connection.close()

    def commits(self) -> int:
        """Return a number that changes when another connection commits.

        Where the header is as it was, it is the last number: reading it takes a tenth of the query. Raises
        `sqlite3.DatabaseError`.
        """
        header = b"" if self._index is None else os.pread(self._index, HEADER_BYTES, 0)
        if header and header == self._header:
            return self._commits
        self._commits = int(self.connection.execute("PRAGMA data_version").fetchone()[0])
        self._header = header
        if self._index is None:
            (mode,) = self.connection.execute("PRAGMA journal_mode").fetchone()
            # The connection has it open now, so that nobody removes it.
            if mode == "wal" and self._index_path.exists():
                self._index = os.open(self._index_path, os.O_RDONLY)
        return self._commits


class Unread(Exception):
    """Something has to be read, which is not done on the event loop."""


class _Here(threading.local):
    reads = True


class CatalogRows:
    """The rows of one gateway, and its looks at the catalog. Thread-safe; `ask` is for one event loop."""

    def __init__(self, catalog: Catalog, most: int = LEAST_ROWS, clock: Callable[[], float] = time.monotonic):
        self._changes, self._is_file, self._label = catalog.changes, catalog.is_file, catalog.access.label
        self.watch = CommitWatch(self._label) if self._is_file else None
        if self.watch:
            catalog.access.ending.callback(self.watch.close)
        self.clock = clock
        self._most = most
        self._rows, self._absent = RowCache(most), RowCache(ABSENT_ROWS)
        # Policies with changes not taken yet; None: any policy may have changed.
        self._changed: set[str] | None = set()
        self._changing = threading.Lock()
        self._said = ""
        # The number of the newest change that was read, None before the first look that succeeded, and a
        # file's number of commits then.
        self._newest: int | None = None
        self._commits: int | None = None
        # How many looks found something. What is read is as new as the number from before it was read.
        self.seen = 0
        # Until when it is known whether the catalog can be read, and the newest time that it could be.
        self.looked_at = self.read_at = clock()
        # Before this time a server is not asked again.
        self._due_at = self.looked_at
        # What was committed before this time is known.
        self.as_of = self.read_at
        # The newest look failed, or has taken too long already.
        self._fails = False
        self._looking, self._here = threading.Lock(), _Here()
        self._looks = ThreadPoolExecutor(1, "graftwork-look", limit_waits, (ANSWER_S,))
        self._reads = ThreadPoolExecutor(THREADS, "graftwork-read", limit_waits, (ANSWER_S,))
        self._under_way: asyncio.Future[None] | None = None

    def __contains__(self, key: Hashable) -> bool:
        """Return whether this row is kept, or that there is none."""
        return key in self._rows or key in self._absent

    async def ask(self, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns, which reads rows; a thread waits for a server in its place."""
        if self._is_file:
            return call(*args)
        await self._look_in_time()
        self._here.reads = False
        try:
            return call(*args)
        except Unread:
            pass
        finally:
            self._here.reads = True
        return await self.in_thread(call, *args)

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Return what a call returns that waits for the catalog."""
        # Its log lines have the request's id.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._reads, context.run, call, *args)

    def refuse_on_loop(self) -> None:
        """Raise `Unread` where this thread may not wait for the catalog."""
        if not self._here.reads:
            raise Unread

    def look(self) -> None:
        """Check for changes. Takes microseconds with SQLite, so every request does it.

        Raises `ServiceError` when the catalog could never be read.
        """
        if not self._here.reads:
            if self._newest is None:
                raise Unread
            return
        with self._looking:
            began = self.clock()
            if not self._is_file and began < self._due_at:
                if self._newest is None:
                    raise ServiceError(UNREADABLE)
                if self._fails:
                    self.looked_at = began
                return
            try:
                self._take(self._commits_now())
                self.as_of = began
                self.read_at = self.clock() if self._is_file else began
                self._fails, self._said = False, ""
            except ServiceError as error:
                self._fails = True
                if self._newest is None:
                    raise self.unreadable(error) from None
            finally:
                self.looked_at = self.clock()
                self._due_at = self.looked_at + POLL_S

    def _commits_now(self) -> int | None:
        """Return a number that changes when another connection commits to the file; None for a server."""
        try:
            return self.watch.commits() if self.watch else None
        except sqlite3.DatabaseError as error:
            raise ServiceError(f"The catalog {self._label} cannot be read: {error}.") from error

    def _take(self, commits: int | None) -> None:
        """Take what has changed, of a file as of this number of commits."""
        if commits is not None and commits == self._commits:
            return
        newest, names = self._changes.since(self._newest or 0)
        if names is None or names:
            self.seen += 1
            self._note(names)
        self._newest, self._commits = newest, commits

    def _note(self, names: set[str | None] | None) -> None:
        """Take what this look found; None: any policy may have changed."""
        self._rows.note(self.seen, names)
        self._absent.note(self.seen, names)
        with self._changing:
            if names is None or self._changed is None or len(self._changed) >= self._most:
                self._changed = None
            else:
                self._changed |= {name for name in names if name is not None}

    def take_changed(self) -> set[str] | None:
        """Return the policies that changed since the last call; None: any policy may have changed."""
        self.look()
        with self._changing:
            changed, self._changed = self._changed, set()
        return changed

    def read(self, whose: str | None, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return the kept row of a policy (None: of a key), or a new read if it has changed.

        While it cannot be read, the old row.
        """
        kept = self._rows.get(key)
        if kept is not None and self._rows.is_fresh(whose, kept[0]):
            return kept[1]
        if not self._here.reads:
            # A row that could not be read again, while the catalog still cannot be, is no news.
            if kept is not None and self._fails and self._rows.unread_since(key) is not None:
                return kept[1]
            raise Unread
        # As of before the read: what changes meanwhile is read again.
        seen = self.seen
        try:
            value = read()
        except (NotFound, Conflict):
            # The catalog answered: no row has this name, or several do.
            self._rows.drop(key)
            raise
        except ServiceError as error:
            if kept is None:
                raise self.unreadable(error) from None
            self._rows.fail(key, kept, self.clock())
            return kept[1]
        self._rows.put(key, seen, value)
        return value

    def share(self, key: Hashable, also: Hashable) -> None:
        """Keep a row under another key as well, as of when it was read, unless a newer one is there."""
        kept, other = self._rows.get(key), self._rows.get(also)
        if kept is not None and not self.is_unread(key) and (other is None or other[0] < kept[0]):
            self._rows.put(also, *kept)

    def find(self, whose: str | None, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return a row as `read` does, or None: that there is none is kept as well, apart from the rows.

        Only for rows whose creation is a change that gateways are told of.
        """

        def read_there() -> Any:
            row = read()
            if row is None:
                raise NotFound("The catalog has no such row.")
            return row

        seen, absent = self.seen, self._absent.get(key)
        if absent is not None and self._absent.is_fresh(whose, absent[0]):
            return None
        try:
            return self.read(whose, key, read_there)
        except NotFound:
            # A client can invent any number of names, so these must not push out rows.
            self._absent.put(key, seen, None)
            return None

    def meet(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return a row that is not kept, or None: it cannot be old, so the catalog is asked for it alone."""
        self.refuse_on_loop()
        seen = self.seen
        try:
            row = read()
        except ServiceError as error:
            raise self.unreadable(error) from None
        if row is None:
            self._absent.put(key, seen, None)
            return None
        # Before the look, which may find that the row has changed since.
        self._rows.put(key, seen, row)
        self.look()
        return row

    def is_unread(self, key: Hashable) -> bool:
        """Return whether this row has changed and could not be read again."""
        return self._rows.unread_since(key) is not None

    def unread_s(self, *keys: Hashable) -> float:
        """Return for how long the catalog, or a changed row among `keys`, has been unreadable (seconds).

        Counts until the newest look, not until now: a process that gets no CPU in between has read it.
        """
        since = [at for key in keys if (at := self._rows.unread_since(key)) is not None]
        return self.looked_at - min([self.read_at, *since]) if since else self.looked_at - self.read_at

    def unreadable(self, error: ServiceError) -> ServiceError:
        """Return what a client hears; the cause, which names the database's place, is logged once."""
        if str(error) != self._said:
            log.error("%s", error)
        self._said = str(error)
        return ServiceError(UNREADABLE)

    async def _look_in_time(self) -> None:
        """Have a thread look when the newest look is too old. Nobody waits for a server that fails."""
        if self._under_way is None:
            if self.clock() < self._due_at:
                return
            self._under_way = asyncio.get_running_loop().run_in_executor(self._looks, self.look)
            self._under_way.add_done_callback(self._looked)
        if not self._fails:
            await asyncio.wait([self._under_way], timeout=LOOK_S)
        if self._under_way is not None:
            self._fails, self.looked_at = True, self.clock()

    def _looked(self, look: "asyncio.Future[None]") -> None:
        self._under_way = None
        # An error was counted, and whoever needs the catalog gets it from its own look.
        if not look.cancelled():
            look.exception()
