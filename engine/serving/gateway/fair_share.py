"""Fair queueing between tenants where the engine is full: start-time fair queueing (Goyal et al., 1996).

Each request gets a start tag, which vLLM's scheduler takes as its priority (the lowest first). A tenant's
tags advance by its tokens over its weight, so a burst queues behind its own earlier requests and not in front
of other tenants. A tenant that was idle starts at the tag that is in service now: it saves nothing up.
"""

import heapq


class FairShare:
    """The tags of one engine. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0.0
        # The tag at which each tenant's last request ends.
        self._ends: dict[str, float] = {}
        self._under_way: list[float] = []
        self._left: list[float] = []

    def enter(self, tenant: str, tokens: int, weight: float) -> float:
        """Return the start tag of a request that may take this many tokens."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + tokens / weight
        heapq.heappush(self._under_way, start)
        return start

    def leave(self, start: float) -> None:
        """End a request; the time of the tags advances to the first one that is still under way."""
        heapq.heappush(self._left, start)
        while self._left and self._under_way and self._left[0] == self._under_way[0]:
            heapq.heappop(self._left)
            self._now = heapq.heappop(self._under_way)
        if self._under_way:
            self._now = max(self._now, self._under_way[0])
        else:
            # Nobody waits: every tenant begins anew.
            self._now = 0.0
            self._ends.clear()
