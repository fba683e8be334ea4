"""A bounded LRU cache of catalog rows, which tracks the rows that have changed and those now unreadable."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

# Least rows to cache, about 2 kB each. Each adapter of the host tier needs three (route, revision,
# tombstone); the other three are for adapters that have left it.
LEAST_ROWS = 8192
ROWS_PER_ADAPTER = 6


def rows_to_cache(host_adapters: int) -> int:
    """Return how many rows a router caches for a host tier of `host_adapters`."""
    return max(LEAST_ROWS, ROWS_PER_ADAPTER * host_adapters)


class RowCache:
    """Catalog rows, each with the number of the newest look at the catalog before it was read. LRU eviction.

    Thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
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
                self._drop(next(iter(self._rows)))

    def drop(self, key: Hashable) -> None:
        """Remove a row, if it is cached."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
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
