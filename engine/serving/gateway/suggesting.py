"""Errors for unknown models, with suggestions of similar names.

To find similar names takes milliseconds, so a thread does it, for a few requests at a time. Repeated requests
get the same error until something changes.
"""

from collections.abc import Awaitable, Callable

from engine.catalog.catalog import Catalog
from engine.catalog.records import covers, split_served_name
from engine.catalog.suggestions import Suggestions
from engine.errors import NotFound
from engine.serving.gateway.catalog_rows import RowCache
from engine.serving.gateway.routing import SHOWN
from engine.settings.params import POLICY_NAME

# Unknown names whose errors are kept.
KEPT = 1024
# Threads that look for similar names at once; further requests get an error without suggestions.
AT_ONCE = 2


class Suggester:
    """Adds suggestions to the errors of one gateway. Not thread-safe."""

    def __init__(self, catalog: Catalog, base_name: str, in_thread: Callable[..., Awaitable[NotFound]]):
        """`in_thread` returns what a call returns that waits for the catalog."""
        self._suggestions = Suggestions(catalog.access)
        self._base_name, self._in_thread = base_name, in_thread
        self._kept = RowCache(KEPT)
        self._running = 0

    async def __call__(self, model: str, change: int, patterns: tuple[str, ...] = ()) -> NotFound:
        """Return the error for an unknown model; errors are kept while `change` is the newest change.

        It suggests only policies that `patterns`, those of a tenant, cover; none: any.
        """
        model = model[: SHOWN + 1]
        kept = self._kept.get((model, patterns))
        if kept is not None and kept[0] == change:
            return NotFound(*kept[1])
        if self._running >= AT_ONCE:
            return NotFound(f"Unknown model {model[:SHOWN]!r}.")
        self._running += 1
        try:
            error = await self._in_thread(self._find, model, patterns)
        finally:
            self._running -= 1
        self._kept.put((model, patterns), change, (str(error), error.nearest))
        return error

    def _find(self, model: str, patterns: tuple[str, ...]) -> NotFound:
        policy, digest = split_served_name(model)
        is_mine = not patterns or any(covers(pattern, policy) for pattern in patterns)
        if digest and is_mine and POLICY_NAME.fullmatch(policy):
            return self._suggestions.missing(policy, digest, patterns)
        # Of a name outside of the tenant's policies nothing is looked up.
        near = self._suggestions.policies(policy[:SHOWN], patterns) if is_mine else []
        nearest = [self._base_name, *near]
        return NotFound(f"Unknown model {model[:SHOWN]!r}. Known models: {', '.join(nearest)}.", nearest)
