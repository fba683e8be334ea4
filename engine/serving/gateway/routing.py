"""Which revision answers a request: the catalog's rows, read again when they may have changed.

A row is read when it is asked for and kept until anything in the catalog changes, so that neither start nor
change costs more with a million policies than with one. The split between champion and canary is a hash of
policy, unit and salt, so that any number of gateways agree without talking. Knows neither HTTP nor vLLM.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.catalog.catalog import Catalog, Key, Revision, Route
from engine.catalog.keys import hash_key
from engine.errors import AdapterError, Conflict, Gone, GraftworkError, NotFound, ServiceError
from engine.serving.gateway.row_cache import LEAST_ROWS, RowCache
from engine.settings.params import DIGEST12, POLICY_NAME, served_name, split_served_name

# A gateway that could not read the catalog for this long answers from champions alone.
STALE_S = 0.8
# Characters of an unknown name that its refusal repeats.
SHOWN = 100
# Purposes that may still reach a revision with a tombstone: judging it is not serving it.
JUDGING = frozenset({"score", "probe"})
log = logging.getLogger("graftwork.routing")


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
    """Resolve model names. For one thread; every call sees the newest committed rows."""

    def __init__(
        self,
        catalog: Catalog,
        base_name: str,
        base_digest: str,
        clock: Callable[[], float] = time.monotonic,
        cached_rows: int = LEAST_ROWS,
        configured: str | None = None,
    ):
        self.base_name = base_name
        # Its directory or hub id in the settings names the base too.
        self._base_names = {base_name, configured or base_name}
        self._base_digest = base_digest
        self._catalog = catalog
        self._clock = clock
        # Of the whole catalog, and the last change to what is routed by.
        self._version: int | None = None
        self._seen = 0
        self._read_at = clock()
        self._cached_rows = cached_rows
        self._rows = RowCache(cached_rows)
        # None: anything may have changed.
        self._changed: set[str] | None = set()
        self._released: tuple[int | None, frozenset[tuple[str, str]]] = None, frozenset()

    def key(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext."""
        self._look()

        def read() -> Key:
            found = self._catalog.keys.find(plaintext)
            if found is None:
                raise NotFound("There is no such key.")
            return found

        try:
            key: Key = self._read(None, ("key", hash_key(plaintext)), read)
        except NotFound:
            return None
        return key

    def resolve(self, model: str, unit: str, purpose: str = "user") -> Target:
        """Return who answers `model` for this unit.

        Raises `NotFound` for an unknown policy or revision, `Ambiguous` for a prefix of several, and `Gone`
        for a pinned revision that is retired or has a tombstone; `ServiceError` when it may have one by now.
        """
        self._look()
        if model in self._base_names:
            return Target(None, None, "base")
        policy, digest = split_served_name(model)
        if not POLICY_NAME.fullmatch(policy):
            raise self._unknown(model, policy)
        if digest is None:
            try:
                route = self._route(policy)
            except NotFound:
                raise self._unknown(model, policy) from None
            return self._follow(route, unit)
        if not digest:
            raise NotFound(f"{model!r} names no digest; ask for {policy!r} or {policy}@DIGEST.", [policy])
        try:
            pinned = self._revision(policy, digest)
        except NotFound as missing:
            raise self._purged(model, policy) or missing from None
        if purpose not in JUDGING:
            reason = self._reason(pinned)
            if reason is not None:
                raise Gone(f"{model} {reason}")
            if self._is_stale(_stone_of(policy, pinned.digest)):
                raise ServiceError(
                    f"The catalog could not be read for {STALE_S:g} s, and {model} may have been rolled back "
                    "meanwhile. Try again, or ask for the policy."
                )
        return Target(policy, pinned.digest, "pinned")

    def revision(self, policy: str, digest: str, may_be_old: bool = True) -> Revision:
        """Return a revision by its digest or a prefix of it.

        Raises `AdapterError` when it belongs to another base: the same shapes would load and be wrong; and
        `ServiceError` when it has changed and cannot be read, unless its row `may_be_old`.
        """
        self._look()
        found = self._revision(policy, digest)
        if not may_be_old and self._rows.unread_since(("revision", policy, digest)) is not None:
            raise ServiceError(f"The row of {served_name(policy, digest)} cannot be read. Try again.")
        return found

    def in_quarantine(self, revisions: Iterable[Revision]) -> set[tuple[str, str]]:
        """Return which of these revisions (policy, digest) are served to nobody: their bytes are damaged."""
        return self._catalog.quarantine.among([revision.digest for revision in revisions])

    def policies(self, limit: int) -> list[str]:
        """Return the names of so many policies, in their order."""
        return self._catalog.routes.first_policies(limit)

    def take_changed(self) -> set[str] | None:
        """Return the policies of which something has changed since the last call; None: any of them may."""
        self._look()
        changed, self._changed = self._changed, set()
        return changed

    def under_release(self) -> frozenset[tuple[str, str]]:
        """Return (policy, digest) of what must stay resident: canaries, and champions and baselines beside.

        As many as releases run, whatever the number of routes. What it last was while it cannot be read.
        """
        try:
            self._look()
            if self._released[0] != self._version:
                self._released = self._version, self._read_released()
        except GraftworkError as error:
            log.warning("What is under release cannot be read; it is taken to be as it was: %s", error)
        return self._released[1]

    def _read_released(self) -> frozenset[tuple[str, str]]:
        found = set()
        for release in self._catalog.releases.all(open_only=True):
            with suppress(NotFound):
                route = self._route(release.policy)
                if self._rows.unread_since(("route", release.policy)) is not None:
                    raise ServiceError(f"The route of {release.policy!r} cannot be read.")
                # Before its canary a candidate is asked for by probe and scorer alone, who can wait.
                digests = (route.canary, route.champion, release.baseline)
                found |= {(release.policy, digest) for digest in digests if digest}
        return frozenset(found)

    def _look(self) -> None:
        """Ask whether anything has changed: microseconds, so that every request can ask."""
        try:
            version = self._catalog.changes.version()
            if version != self._version:
                self._seen, names = self._catalog.changes.since(self._seen)
                self._rows.note(self._seen, names)
                self._note_changed(names)
                self._version = version
            self._read_at = self._clock() - self._catalog.changes.age()
        except ServiceError as error:
            if self._version is None:
                raise ServiceError(f"{error} Requests wait for it.") from None

    def _note_changed(self, names: set[str | None] | None) -> None:
        if names is None or self._changed is None or len(self._changed) >= self._cached_rows:
            self._changed = None
        else:
            self._changed |= {name for name in names if name is not None}

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
        except ServiceError as error:
            if kept is None:
                raise ServiceError(f"{error} Try again.") from None
            self._rows.fail(key, self._clock())
            return kept[1]
        self._rows.put(key, self._seen, value)
        return value

    def _is_stale(self, *keys: Hashable) -> bool:
        """Say whether the catalog, or one of these rows once it had changed, was unreadable for too long."""
        since = [at for key in keys if (at := self._rows.unread_since(key)) is not None]
        return self._clock() - min([self._read_at, *since]) > STALE_S

    def _route(self, policy: str) -> Route:
        # A name that is not there is not kept: anybody may make up as many as they like.
        route: Route = self._read(policy, ("route", policy), lambda: self._catalog.routes.get(policy))
        return route

    def _revision(self, policy: str, digest: str) -> Revision:
        if len(digest) < DIGEST12:
            # Any new revision may begin with so few digits, too.
            found = self._catalog.revisions.get(policy, digest)
        else:
            key = ("revision", policy, digest)
            found = self._read(policy, key, lambda: self._catalog.revisions.get(policy, digest))
            if len(digest) < len(found.digest):
                # Who asked by a prefix asks for its whole digest next.
                whole = ("revision", policy, found.digest)
                self._read(policy, whole, lambda: found)
        if found.base != self._base_digest:
            raise AdapterError(
                f"{served_name(policy, found.digest)} belongs to base {found.base[:12]}, and this engine "
                f"serves {self._base_digest[:12]}. Start an engine with that base, or train it again."
            )
        return found

    def _is_buried(self, policy: str, digest: str) -> bool:
        return self._stone(policy, digest) is not None

    def _stone(self, policy: str, digest: str) -> Any:
        key = _stone_of(policy, digest)
        return self._read(policy, key, lambda: self._catalog.tombstones.find(policy, digest))

    def _reason(self, revision: Revision) -> str | None:
        """Return why a revision is served to nobody, None if it is served."""
        stone = self._stone(revision.policy, revision.digest)
        if stone is not None:
            return f"was rolled back: {stone.reason} `graftwork lift` puts it back."
        if revision.retired_at is not None:
            return f"was retired: {revision.retired_reason} `graftwork adapters unretire` puts it back."
        return None

    def _purged(self, model: str, policy: str) -> Gone | None:
        purged = self._catalog.purges.find(policy)
        if purged is None:
            return None
        return Gone(f"{model[:SHOWN]} was purged by {purged['by']}; its adapters are gone for good.")

    def _unknown(self, model: str, policy: str) -> GraftworkError:
        """Return why there is no such model: its name was purged, or never known."""
        if POLICY_NAME.fullmatch(policy) and (gone := self._purged(model, policy)) is not None:
            return gone
        nearest = [self.base_name, *self._catalog.suggestions.policies(policy[:SHOWN])]
        return NotFound(f"There is no model {model[:SHOWN]!r}. Known: {', '.join(nearest)}.", nearest)

    def _follow(self, route: Route, unit: str) -> Target:
        arms = [("canary", route.canary)] if in_canary(route, unit) else []
        for arm, digest in [*arms, ("champion", route.champion)]:
            if digest and not self._is_buried(route.policy, digest):
                read = ("route", route.policy), _stone_of(route.policy, digest)
                if arm == "canary" and self._is_stale(*read):
                    continue
                return Target(route.policy, digest, arm, route.version)
        return Target(route.policy, None, "base", route.version)


def _stone_of(policy: str, digest: str) -> Hashable:
    return "tombstone", policy, digest


def in_canary(route: Route, unit: str) -> bool:
    """Return whether a unit is in the share of `route.weight` that the canary answers."""
    if route.canary is None:
        return False
    word = hashlib.sha256(f"{route.policy}\0{unit}\0{route.salt}".encode()).digest()[:8]
    return int.from_bytes(word, "big") < route.weight * 2**64
