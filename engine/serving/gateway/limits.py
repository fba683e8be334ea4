"""A limit that is reached, and the share that a tenant takes of the queue of cold loads."""

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.errors import LimitReached

# The share of the queue of cold loads that a tenant with policies of its own may take.
LOAD_SHARE = 0.5
REFUSED = Counter("graftwork_requests_limited", "Requests refused by a limit.", ["tenant", "limit"])


def over(tenant: Tenant, limit: str, what: str, subject: str, retry_s: float) -> LimitReached:
    """Return the error for a limit that is reached, and count it."""
    REFUSED.labels(tenant.name, limit).inc()
    of = f" of the {subject.partition(':')[0]}" if subject else ""
    return LimitReached(f"The limit{of}, {what}, is reached. Try again later.", min(retry_s, 60.0))


class LoadShare:
    """How many cold adapters each tenant waits for, of the `places` that the queue has. Not thread-safe."""

    def __init__(self, places: int):
        self._places = places
        # Of each tenant, the adapters that it waits for, and by how many calls; and those loaded ahead.
        self.waited: dict[str, Tally[str]] = {}
        self._ahead: dict[str, set[str]] = {}

    def prewarm(self, key: Key, tenant: Tenant, name: str, is_loading: Callable[[str], bool]) -> None:
        """Count an adapter that is loaded ahead of its requests. Raises as `wait`."""
        before = self._ahead.get(tenant.name, set())
        self._ahead[tenant.name] = {one for one in before if is_loading(one)}
        self._refuse(key, tenant, name)
        self._ahead[tenant.name].add(name)

    @contextmanager
    def wait(self, key: Key, tenant: Tenant, name: str) -> Iterator[None]:
        """Wait for a cold adapter.

        Raises `LimitReached` when as many other adapters are loaded for this tenant as its share allows.
        """
        self._refuse(key, tenant, name)
        mine = self.waited.setdefault(tenant.name, Tally())
        mine[name] += 1
        try:
            yield
        finally:
            mine[name] -= 1
            if not mine[name]:
                del mine[name]

    def _refuse(self, key: Key, tenant: Tenant, name: str) -> None:
        share = tenant.limits.get("load_share", LOAD_SHARE if key.policies else 1.0)
        share = min(share, key.limits.get("load_share", 1.0))
        mine = {*self.waited.get(tenant.name, ()), *self._ahead.get(tenant.name, ())}
        if name not in mine and len(mine) >= max(1, math.floor(share * self._places)):
            limit = f"{share:.0%} of the queue of cold loads"
            raise over(tenant, "load_share", limit, f"tenant:{tenant.name}", 1.0)
