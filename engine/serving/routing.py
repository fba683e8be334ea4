"""Which revision answers a request: the catalog's routes, read again whenever they change.

The split between champion and canary is a hash of policy, unit and salt, so that any number of
gateways agree without talking. Knows neither HTTP nor vLLM.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.adapters.catalog import Catalog, Key, Revision, Route, ServingState
from engine.adapters.catalog_guards import hash_key
from engine.config import served_name, split_served_name
from engine.errors import AdapterError, GraftworkError, NotFound, ServiceError

# A gateway that could not read the catalog for this long answers from champions alone.
STALE_S = 0.8
PINNED_CACHE = 100_000
# Purposes that may still reach a revision with a tombstone: judging it is not serving it.
JUDGING = frozenset({"score", "probe"})


class Gone(GraftworkError):
    """The pinned revision has a tombstone; the message is its reason."""


@dataclass(frozen=True)
class Target:
    """Who answers: `digest` None is the base; `arm` is champion, canary, base or pinned."""

    policy: str | None
    digest: str | None
    arm: str
    route_version: int | None = None

    @property
    def name(self) -> str | None:
        """The served name, or None for the base."""
        return served_name(self.policy, self.digest) if self.policy and self.digest else None


class Router:
    """Resolve model names. For one thread; every call sees the newest committed routes."""

    def __init__(
        self,
        catalog: Catalog,
        base_name: str,
        base_digest: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.base_name = base_name
        self._base_digest = base_digest
        self._catalog = catalog
        self._clock = clock
        self._version: int | None = None
        self._state = ServingState({}, frozenset(), {}, {})
        self._read_at = clock()
        self._pinned: dict[tuple[str, str], Revision] = {}

    def refresh(self) -> ServingState:
        """Read the routes again if the catalog has changed; keep the last ones while it cannot be read."""
        try:
            # Asking for the version costs microseconds, so that every request can ask.
            version = self._catalog.data_version()
            if version != self._version:
                self._state = self._catalog.serving_state()
                self._version = version
            self._read_at = self._clock()
        except Exception as error:
            if self._version is None:
                raise ServiceError(f"The catalog cannot be read: {error}. Requests wait for it.") from None
        return self._state

    def key(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext."""
        return self.refresh().keys.get(hash_key(plaintext))

    def resolve(self, model: str, unit: str, purpose: str = "user") -> Target:
        """Return who answers `model` for this unit.

        Raises `NotFound` for an unknown policy or revision and `Gone` for a pinned tombstone.
        """
        state = self.refresh()
        if model == self.base_name:
            return Target(None, None, "base")
        policy, digest = split_served_name(model)
        if policy not in state.routes:
            known = ", ".join([self.base_name, *sorted(state.routes)[:20]])
            raise NotFound(f"There is no model {model!r}. Known: {known}.")
        if digest is None:
            return self._follow(state, state.routes[policy], unit)
        pinned = self.revision(policy, digest)
        reason = state.reasons.get((policy, pinned.digest))
        if reason is not None and purpose not in JUDGING:
            raise Gone(f"{model} was rolled back: {reason} `graftwork lift` puts it back.")
        return Target(policy, pinned.digest, "pinned")

    def revision(self, policy: str, digest: str) -> Revision:
        """Return a revision by its digest or a prefix of it.

        Rows are kept: all but the place of the bytes is immutable, and a load reads that anew.
        Raises `AdapterError` when it belongs to another base: the same shapes would load and be wrong.
        """
        known = self._pinned.get((policy, digest))
        if known is None:
            known = self._catalog.revision(policy, digest)
            if known.base != self._base_digest:
                raise AdapterError(
                    f"{served_name(policy, known.digest)} belongs to base {known.base[:12]}, and this engine "
                    f"serves {self._base_digest[:12]}. Start an engine with that base, or train it again."
                )
            if len(self._pinned) >= PINNED_CACHE:
                self._pinned.clear()
            self._pinned[policy, digest] = known
        return known

    def _follow(self, state: ServingState, route: Route, unit: str) -> Target:
        if self._clock() - self._read_at > STALE_S:
            route = replace(route, canary=None)
        arms = [("canary", route.canary)] if in_canary(route, unit) else []
        for arm, digest in [*arms, ("champion", route.champion)]:
            if digest and (route.policy, digest) not in state.tombstones:
                return Target(route.policy, digest, arm, route.version)
        return Target(route.policy, None, "base", route.version)


def in_canary(route: Route, unit: str) -> bool:
    """Return whether a unit is in the share of `route.weight` that the canary answers."""
    if route.canary is None:
        return False
    word = hashlib.sha256(f"{route.policy}\0{unit}\0{route.salt}".encode()).digest()[:8]
    return int.from_bytes(word, "big") < route.weight * 2**64
