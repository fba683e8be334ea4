"""Errors for unknown models, with suggestions of similar names.

To find similar names takes milliseconds, so a thread does it, for a few requests at a time. Repeated requests
get the same error until something changes.
"""

import asyncio

from engine.catalog.catalog import Catalog
from engine.errors import NotFound
from engine.serving.gateway.row_cache import RowCache
from engine.settings.params import POLICY_NAME, split_served_name

# How many characters of an unknown name an error repeats.
SHOWN = 100
# Unknown names whose errors are kept.
KEPT = 1024
# Threads that look for similar names at once; further requests get an error without suggestions.
AT_ONCE = 2


class Suggester:
    """Adds suggestions to the errors of one gateway. Not thread-safe."""

    def __init__(self, catalog: Catalog, base_name: str):
        self._catalog, self._base_name = catalog, base_name
        self._kept = RowCache(KEPT)
        self._running = 0

    async def unknown(self, model: str, change: int) -> NotFound:
        """Return the error for an unknown model; errors are kept while `change` is the newest change."""
        model = model[: SHOWN + 1]
        kept = self._kept.get(model)
        if kept is not None and kept[0] == change:
            return NotFound(*kept[1])
        if self._running >= AT_ONCE:
            return NotFound(f"Unknown model {model[:SHOWN]!r}.")
        self._running += 1
        try:
            found = await asyncio.to_thread(self._find, model)
        finally:
            self._running -= 1
        self._kept.put(model, change, (str(found), found.nearest))
        return found

    def _find(self, model: str) -> NotFound:
        policy, digest = split_served_name(model)
        if digest and POLICY_NAME.fullmatch(policy):
            return self._catalog.suggestions.missing(policy, digest)
        nearest = [self._base_name, *self._catalog.suggestions.policies(policy[:SHOWN])]
        return NotFound(f"Unknown model {model[:SHOWN]!r}. Known models: {', '.join(nearest)}.", nearest)
