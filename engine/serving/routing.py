"""Which revision answers a request: the catalog's rows, read again when they may have changed.

A row is read when it is asked for and kept until anything in the catalog changes, so that neither start nor
change costs more with a million policies than with one. The split between champion and canary is a hash of
policy, unit and salt, so that any number of gateways agree without talking. Knows neither HTTP nor vLLM.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from engine.adapters.catalog import Catalog, Key, Revision, Route
from engine.adapters.catalog_guards import hash_key
from engine.config import DIGEST12, served_name, split_served_name
from engine.errors import AdapterError, Conflict, GraftworkError, NotFound, ServiceError

# A gateway that could not read the catalog for this long answers from champions alone.
STALE_S = 0.8
# Rows that are kept, some 2 kB each.
KEPT = 8192
# Purposes that may still reach a revision with a tombstone: judging it is not serving it.
JUDGING = frozenset({"score", "probe"})


class Gone(GraftworkError):
    """The pinned revision is served to nobody any more; the message is the reason."""


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


class Rows:
    """Rows of the catalog as they were read, each with the change that it was read after. Bounded."""

    def __init__(self) -> None:
        self._rows: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
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
        if len(self._rows) > KEPT:
            self._rows.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        self._rows.pop(key, None)

    def is_fresh(self, whose: str | None, seen: int) -> bool:
        return seen >= max(self._all_changed, self._changed.get(whose, 0))

    def note(self, change: int, names: set[str | None] | None) -> None:
        """Take the rows of these names (None: of everybody) for old if they were read before this change."""
        if names is None:
            self._all_changed = change
            return
        for name in names:
            self._changed[name] = change
            self._changed.move_to_end(name)
        while len(self._changed) > KEPT:
            self._all_changed = max(self._all_changed, self._changed.popitem(last=False)[1])


class Router:
    """Resolve model names. For one thread; every call sees the newest committed rows."""

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
        # Of the whole catalog, and the last change to what is routed by.
        self._version: int | None = None
        self._seen = 0
        self._read_at = clock()
        self._rows = Rows()
        self._changed: set[str] = set()
        self._released: tuple[int | None, frozenset[tuple[str, str]]] = None, frozenset()

    def key(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext."""
        self._look()
        found: Key | None = self._read(
            None, ("key", hash_key(plaintext)), lambda: self._catalog.key(plaintext)
        )
        return found

    def resolve(self, model: str, unit: str, purpose: str = "user") -> Target:
        """Return who answers `model` for this unit.

        Raises `NotFound` for an unknown policy or revision, `Ambiguous` for a prefix of several, and `Gone`
        for a pinned revision that is retired or has a tombstone.
        """
        self._look()
        if model == self.base_name:
            return Target(None, None, "base")
        policy, digest = split_served_name(model)
        if digest is None:
            route = self._route(policy)
            if route is None:
                raise self._unknown(model, policy)
            return self._follow(route, unit)
        if not digest:
            raise NotFound(f"{model!r} names no digest; ask for {policy!r} or {policy}@DIGEST.", [policy])
        try:
            pinned = self._revision(policy, digest)
        except NotFound as missing:
            raise self._purged(model, policy) or missing from None
        reason = self._reason(pinned)
        if reason is not None and purpose not in JUDGING:
            raise Gone(f"{model} {reason}")
        return Target(policy, pinned.digest, "pinned")

    def revision(self, policy: str, digest: str) -> Revision:
        """Return a revision by its digest or a prefix of it.

        Raises `AdapterError` when it belongs to another base: the same shapes would load and be wrong.
        """
        self._look()
        return self._revision(policy, digest)

    def policies(self, limit: int) -> list[str]:
        """Return the names of so many policies, in their order."""
        return self._catalog.first_policies(limit)

    def take_changed(self) -> set[str]:
        """Return the policies of which something has changed since the last call; thousands at most."""
        self._look()
        changed, self._changed = self._changed, set()
        return changed

    def under_release(self) -> frozenset[tuple[str, str]]:
        """Return (policy, digest) of what must stay resident: canaries, and champions and baselines beside.

        As many as releases run, whatever the number of routes.
        """
        self._look()
        if self._released[0] != self._version:
            version, found = self._version, set()
            for release in self._catalog.releases(open_only=True):
                route = self._route(release.policy)
                # Before its canary a candidate is asked for by probe and scorer alone, who can wait.
                digests = (route.canary, route.champion, release.baseline) if route else ()
                found |= {(release.policy, digest) for digest in digests if digest}
            self._released = version, frozenset(found)
        return self._released[1]

    def _look(self) -> None:
        """Ask whether anything has changed: microseconds, so that every request can ask."""
        try:
            version = self._catalog.data_version()
            if version != self._version:
                self._seen, names = self._catalog.changed_since(self._seen)
                self._rows.note(self._seen, names)
                if len(self._changed) < KEPT:
                    self._changed |= {name for name in names or () if name is not None}
                self._version = version
            self._read_at = self._clock()
        except Exception as error:
            if self._version is None:
                raise ServiceError(f"The catalog cannot be read: {error}. Requests wait for it.") from None

    def _read(self, whose: str | None, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return what is kept, or read it anew; what was last read holds while the catalog cannot be read."""
        kept = self._rows.get(key)
        if kept is not None and self._rows.is_fresh(whose, kept[0]):
            return kept[1]
        try:
            value = read()
        except (NotFound, Conflict):
            # An answer, not a failure: nobody has it, or several have.
            self._rows.drop(key)
            raise
        except Exception as error:
            if kept is None:
                raise ServiceError(f"The catalog cannot be read: {error}. Try again.") from None
            return kept[1]
        self._rows.put(key, self._seen, value)
        return value

    def _route(self, policy: str) -> Route | None:
        def read() -> Route | None:
            try:
                return self._catalog.route(policy)
            except NotFound:
                return None

        found: Route | None = self._read(policy, ("route", policy), read)
        return found

    def _revision(self, policy: str, digest: str) -> Revision:
        if len(digest) < DIGEST12:
            # Any new revision may begin with so few digits, too.
            found = self._catalog.revision(policy, digest)
        else:
            key = ("revision", policy, digest)
            found = self._read(policy, key, lambda: self._catalog.revision(policy, digest))
        if found.base != self._base_digest:
            raise AdapterError(
                f"{served_name(policy, found.digest)} belongs to base {found.base[:12]}, and this engine "
                f"serves {self._base_digest[:12]}. Start an engine with that base, or train it again."
            )
        return found

    def _is_buried(self, policy: str, digest: str) -> bool:
        return self._stone(policy, digest) is not None

    def _stone(self, policy: str, digest: str) -> Any:
        key = ("tombstone", policy, digest)
        return self._read(policy, key, lambda: self._catalog.tombstone(policy, digest))

    def _reason(self, revision: Revision) -> str | None:
        """Return why a revision is served to nobody, None if it is served."""
        stone = self._stone(revision.policy, revision.digest)
        if stone is not None:
            return f"was rolled back: {stone.reason} `graftwork lift` puts it back."
        if revision.retired_at is not None:
            return f"was retired: {revision.retired_reason} `graftwork adapters unretire` puts it back."
        return None

    def _purged(self, model: str, policy: str) -> Gone | None:
        purged = self._catalog.purged(policy)
        return (
            Gone(f"{model} was purged by {purged['by']}; its adapters are gone for good.") if purged else None
        )

    def _unknown(self, model: str, policy: str) -> GraftworkError:
        """Return why there is no such model: its name was purged, or never known."""
        if (gone := self._purged(model, policy)) is not None:
            return gone
        nearest = [self.base_name, *self._catalog.nearest_policies(policy)]
        return NotFound(f"There is no model {model!r}. Known: {', '.join(nearest)}.", nearest)

    def _follow(self, route: Route, unit: str) -> Target:
        if self._clock() - self._read_at > STALE_S:
            route = replace(route, canary=None)
        arms = [("canary", route.canary)] if in_canary(route, unit) else []
        for arm, digest in [*arms, ("champion", route.champion)]:
            if digest and not self._is_buried(route.policy, digest):
                return Target(route.policy, digest, arm, route.version)
        return Target(route.policy, None, "base", route.version)


def in_canary(route: Route, unit: str) -> bool:
    """Return whether a unit is in the share of `route.weight` that the canary answers."""
    if route.canary is None:
        return False
    word = hashlib.sha256(f"{route.policy}\0{unit}\0{route.salt}".encode()).digest()[:8]
    return int.from_bytes(word, "big") < route.weight * 2**64
