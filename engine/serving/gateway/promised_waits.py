"""Promised waits: whom the full queue of cold loads refuses hears to come back behind those refused before.

The staggered times keep the queue full. With one time for all, they would return together, most of them in
vain, and leave the queue empty until then.
"""

import time
from collections import defaultdict

from engine.serving.residency.loads import AWAY_S


class PromisedWaits:
    """`Retry-After` of one queue's refusals; handed to its `Residency`."""

    def __init__(self) -> None:
        # When the last refused client of each priority will find a place, if all of them come back.
        self._promised: dict[str, float] = defaultdict(float)

    def __call__(self, priority: str, free_each_s: float) -> float:
        """Return after how many seconds a client should retry, where a place is free each `free_each_s`."""
        now = time.monotonic()
        until = min(max(self._promised[priority], now) + free_each_s, now + AWAY_S)
        self._promised[priority] = until
        # The difference of two clock times may be a rounding error over the limit.
        return min(max(1.0, until - now), AWAY_S)
