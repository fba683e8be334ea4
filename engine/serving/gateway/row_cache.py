"""Rows of the catalog that a gateway keeps: which have changed since, which could not be read again.

Knows changes by number and by policy. Does not know what a row says.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

# Rows that are kept at least, some 2 kB each, and for each adapter of the host tier: its route, its revision
# and its tombstone, and as many again of those that left.
LEAST_ROWS = 8192
ROWS_PER_ADAPTER = 6


def rows_to_cache(host_adapters: int) -> int:
    """Return how many rows a router keeps beside a host tier of so many adapters."""
    return max(LEAST_ROWS, ROWS_PER_ADAPTER * host_adapters)


class RowCache:
    """Rows of the catalog as they were read, each with the change that it was read after. Bounded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        # Since when a row that has changed could not be read again.
        self._unread: dict[Hashable, float] = {}
        # Whose rows were read too early: the change that made them old, and one for all who are not named.
        self._changed: OrderedDict[str | None, int] = OrderedDict()
        self._all_changed = 0

    def get(self, key: Hashable) -> tuple[int, Any] | None:
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def put(self, key: Hashable, seen: int, value: Any) -> None:
        self._rows[key] = seen, value
        self._rows.move_to_end(key)
        self._unread.pop(key, None)
        if len(self._rows) > self._most:
            self.drop(next(iter(self._rows)))

    def drop(self, key: Hashable) -> None:
        self._rows.pop(key, None)
        self._unread.pop(key, None)

    def fail(self, key: Hashable, now: float) -> None:
        """Note that a row that is kept could not be read again."""
        self._unread.setdefault(key, now)

    def unread_since(self, key: Hashable) -> float | None:
        return self._unread.get(key)

    def is_fresh(self, whose: str | None, seen: int) -> bool:
        return seen >= max(self._all_changed, self._changed.get(whose, 0))

    def note(self, change: int, names: set[str | None] | None) -> None:
        """Take the rows of these names for old if they were read before this change; None: forget all.

        Changes are then counted anew, since the catalog may be an older one that was restored.
        """
        if names is None:
            self._rows.clear()
            self._unread.clear()
            self._changed.clear()
            self._all_changed = 0
            return
        for name in names:
            self._changed[name] = change
            self._changed.move_to_end(name)
        while len(self._changed) > self._most:
            self._all_changed = max(self._all_changed, self._changed.popitem(last=False)[1])
