"""Which engines live, by their heartbeats and the controller's own clock: those of the engines may differ."""

import time
from collections.abc import Callable

from engine.catalog.catalog import Catalog, Replica

# An engine that has not beaten for this long is not waited for.
SILENT_S = 10.0


class Fleet:
    """The engines of a catalog; `clock` is monotonic."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float] = time.monotonic):
        self._catalog, self._clock = catalog, clock
        # The newest beat seen of each engine's start, and when it was first seen.
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def live(self) -> list[Replica]:
        """Return the engines whose heartbeat has changed within `SILENT_S`."""
        now, rows = self._clock(), self._catalog.replicas.all()
        seen = {}
        for row in rows:
            known = self._seen.get((row.id, row.incarnation))
            is_new = known is None or known[0] != row.beats
            seen[row.id, row.incarnation] = (row.beats, now) if is_new or known is None else known
        self._seen = seen
        return [row for row in rows if now - seen[row.id, row.incarnation][1] <= SILENT_S]

    def without(self, policy: str, digest: str, base: str) -> dict[str, str]:
        """Return the live engines of this base that have not loaded a revision, and why, by id."""
        loads = self._catalog.replicas.loads(policy, digest)
        return {
            one.id: loads.get(one.id) or "it has not loaded it yet"
            for one in self.live()
            if one.base == base and not one.draining and loads.get(one.id, "") is not None
        }
