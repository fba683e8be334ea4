"""Routing: which revision answers a request, from kept rows of the catalog.

Rows are read on demand and kept until a change to them is noticed, so start-up and changes cost the same with
a million policies as with one. The split of a policy's units between champion and canary hashes policy, unit
and salt: any number of gateways agree without coordination.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from engine.catalog.catalog import Catalog, Key, Revision, Route, Tenant
from engine.catalog.records import hash_key, served_name, split_served_name
from engine.catalog.revision_rows import Standing
from engine.errors import AdapterError, Forbidden, Gone, GraftworkError, NotFound, ServiceError
from engine.serving.gateway.catalog_rows import LEAST_ROWS, CatalogRows
from engine.settings.params import DIGEST12, POLICY_NAME

# A gateway that could not read the catalog for this long drops every canary.
STALE_S = 0.8
# A tenant's hash is wanted at each of its requests, and a user's again at its next one.
KEPT_HASHES = 4096
# How long a key is trusted while the catalog cannot be read.
KEY_MAX_AGE_S = 60.0
# Steps of a release during which its revision is loaded.
WARM_STEPS = frozenset({"approval", "canary"})
# Purposes that may reach a pinned revision despite a tombstone: scoring it is not serving it.
JUDGING = frozenset({"score", "probe"})
# How many characters of an unknown name an error repeats.
SHOWN = 100
CANARY, FALLBACK = "canary", "fallback"
# Returns the error for an unknown model, as of a change, with suggestions that some patterns cover.
Unknown = Callable[[str, int, tuple[str, ...]], Awaitable[NotFound]]
log = logging.getLogger("graftwork.routing")


@dataclass(frozen=True, slots=True)
class Target:
    """The revision that answers: `digest` None means the base.

    `arm` is `champion`, `canary`, `base`, `pinned`, or `fallback`: champion or base in the place of a canary,
    which counts for neither arm of its release. `plain_units`: the ledger has this policy's units under
    hashes of an older version.
    """

    policy: str | None
    digest: str | None
    arm: str
    route_version: int | None = None
    plain_units: bool = False

    @property
    def name(self) -> str | None:
        """The served name, or None for the base."""
        return served_name(self.policy, self.digest) if self.policy and self.digest else None


def in_canary(route: Route, unit: str) -> bool:
    """Return whether the canary answers this unit: its hash falls into the share `route.weight`."""
    if route.canary is None:
        return False
    word = hashlib.sha256(f"{route.policy}\0{unit}\0{route.salt}".encode()).digest()[:8]
    return int.from_bytes(word, "big") < route.weight * 2**64


class KeyedHash:
    """HMAC-SHA256 with an installation's secret; of some words it returns 24 hex digits."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def __call__(self, *words: str) -> str:
        """Return the hash of these words."""
        return hmac.digest(self._secret, "\0".join(words).encode(), "sha256").hex()[:24]


class Router:
    """Resolve model names; every call sees the newest committed rows.

    With a catalog on a server a call may wait for it: on an event loop, ask through `ask`. Thread-safe.
    """

    def __init__(
        self,
        catalog: Catalog,
        base_name: str,
        base_digest: str,
        clock: Callable[[], float] = time.monotonic,
        cached_rows: int = LEAST_ROWS,
        configured: str | None = None,
        key_max_age_s: float = KEY_MAX_AGE_S,
        suggest: Callable[[Catalog, str, Callable[..., Any]], Unknown] | None = None,
    ):
        """`suggest` makes, of catalog, base and how a thread is asked, what suggests names."""
        self._key_max_age_s = key_max_age_s
        self.base_name = base_name
        # Its directory or hub id in the settings names the base too.
        self._base_names = {base_name, configured or base_name}
        self._base_digest = base_digest
        self._catalog = catalog
        # An HMAC of words that do not come again with the installation's secret (24 hex digits).
        self.hash_once = KeyedHash(catalog.secret)
        # The same of others.
        self.keyed_hash = lru_cache(KEPT_HASHES)(self.hash_once)
        self.rows = CatalogRows(catalog, cached_rows, clock)
        self.ask, self.take_changed = self.rows.ask, self.rows.take_changed
        self._suggest = suggest(catalog, base_name, self.rows.in_thread) if suggest else None
        # What was under release at the look of this number.
        self._released: tuple[int | None, frozenset[tuple[str, str]]] = None, frozenset()

    def key(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext, or None."""
        row = "key", hash_key(plaintext)
        if row in self.rows:
            self.rows.look()
            key: Key | None = self.rows.find(None, row, lambda: self._catalog.keys.find_hash(row[1]))
        else:
            # Such keys may be many, and most are bad ones.
            key = self.rows.meet(row, lambda: self._catalog.keys.find_hash(row[1]))
        if key is None or (key.expires_at is not None and not key.is_in_force(self._catalog.keys.now())):
            return None
        if self.rows.unread_s(row) > self._key_max_age_s:
            raise ServiceError(
                f"The catalog has been unreadable for {self._key_max_age_s:g} s, and the key may have been "
                "revoked since. Try again."
            )
        return key

    def tenant(self, name: str) -> Tenant:
        """Return a tenant's limits and weight, as of the look for its key."""
        tenant: Tenant = self.rows.read(None, ("tenant", name), lambda: self._catalog.keys.tenant(name))
        return tenant

    def resolve(self, model: str, unit: str, purpose: str = "user", key: Key | None = None) -> Target:
        """Return the revision that answers `model` for this unit, of those that `key` (None: any) may use.

        Raises `NotFound` for an unknown policy or revision, and in the same way for another tenant's;
        `Forbidden` for a revision without the role `pin`, `Ambiguous` for a prefix of several digests,
        `Gone` for a pinned revision that is retired or has a tombstone, and `ServiceError` when the catalog
        has been unreadable for so long that the pinned revision may have a tombstone by now.
        """
        self.rows.look()
        return self._resolve(model, unit, purpose, key)

    def _resolve(self, model: str, unit: str, purpose: str, key: Key | None) -> Target:
        if model in self._base_names:
            return Target(None, None, "base")
        policy, digest = split_served_name(model)
        if not POLICY_NAME.fullmatch(policy):
            raise NotFound(f"Unknown model {model[:SHOWN]!r}.")
        if key is not None:
            # Before anything is read: whether a name outside of the key's policies exists changes nothing.
            if not key.sees(policy):
                raise NotFound(f"Unknown model {model[:SHOWN]!r}.")
            if digest is not None and not key.may("pin"):
                raise Forbidden(
                    f"To ask for a revision takes a key with the role 'pin'. Ask for the policy: {policy!r}."
                )
        if digest is None:
            route = self._route(policy)
            if route is None:
                raise self._purged(model, policy) or NotFound(f"Unknown model {model[:SHOWN]!r}.")
            return self._follow(route, unit)
        if not digest:
            raise NotFound(f"{model!r} has no digest after '@'. Use {policy!r} or {policy}@DIGEST.", [policy])
        try:
            pinned = self._standing(policy, digest)
        except NotFound as missing:
            raise self._purged(model, policy) or missing from None
        self._refuse_other_base(pinned.revision)
        if purpose not in JUDGING:
            reason = withheld_for(pinned)
            if reason is not None:
                raise Gone(f"{model} {reason}")
            if self.rows.unread_s(_row_of(policy, digest)) > STALE_S:
                raise ServiceError(
                    f"The catalog has been unreadable for {STALE_S:g} s, and {model} may have been rolled "
                    f"back since. Try again, or use the policy's name {policy!r}."
                )
        return Target(policy, pinned.revision.digest, "pinned")

    def instead_of(self, canary: Target) -> Target:
        """Return who answers in a canary's place: the champion, else the base."""
        route = self._route(canary.policy or "")
        target = (
            self._follow(replace(route, canary=None), "") if route else Target(canary.policy, None, "base")
        )
        return replace(target, arm=FALLBACK)

    async def admit(
        self, model: str, unit: str, purpose: str = "user", key: Key | None = None, looks: bool = True
    ) -> tuple[Target, float]:
        """Return what `resolve` does, and when the look at the catalog behind it began (epoch seconds).

        A tombstone that was committed before that time is respected; whoever has just looked need not do so
        again. Other work may run meanwhile where the catalog is on a server, and for an unknown name, whose
        error may suggest known ones.
        """
        began = time.time()
        try:
            target, read_at = await self.ask(self._admitted, model, unit, purpose, key, looks)
        except NotFound as missing:
            if missing.nearest or self._suggest is None:
                raise
            mine = tuple(key.policies) if key is not None else ()
            try:
                told = await self._suggest(model, self.rows.seen, mine)
            except ServiceError as error:
                raise self.rows.unreadable(error) from None
            raise told from None
        # Requests may share a look: a server is asked five times a second.
        return target, min(began, time.time() - (self.rows.clock() - read_at))

    def _admitted(
        self, model: str, unit: str, purpose: str, key: Key | None, looks: bool
    ) -> tuple[Target, float]:
        """Return what `resolve` does, and when the look behind it began (the router's clock)."""
        if looks:
            self.rows.look()
        read_at = self.rows.as_of
        return self._resolve(model, unit, purpose, key), read_at

    def revision(self, policy: str, digest: str, may_be_old: bool = True) -> Revision:
        """Return a revision by its digest or a prefix of it.

        Raises `AdapterError` when the revision belongs to another base: equal shapes would load and give
        wrong answers. Raises `ServiceError` when the row has changed and cannot be read, unless it
        `may_be_old`.
        """
        self.rows.look()
        revision = self._standing(policy, digest).revision
        self._refuse_other_base(revision)
        if not may_be_old and self.rows.is_unread(_row_of(policy, digest)):
            raise ServiceError(f"The catalog row of {served_name(policy, digest)} is unreadable. Try again.")
        return revision

    def canary(self, policy: str, digest: str) -> Revision:
        """Return a canary's revision as `revision` does. Raises `Gone` when it has a tombstone by now."""
        revision = self.revision(policy, digest)
        if self._has_tombstone(policy, digest):
            raise Gone(f"{served_name(policy, digest)} was rolled back.")
        return revision

    def in_quarantine(self, revisions: Iterable[Revision]) -> set[tuple[str, str]]:
        """Return (policy, digest) of those revisions that are in quarantine: their bytes are damaged."""
        self.rows.refuse_on_loop()
        return self._catalog.quarantine.among([revision.digest for revision in revisions])

    def policies(self, limit: int, patterns: Sequence[str] = ()) -> list[str]:
        """Return the first `limit` names of policies that `patterns` (none: all) cover, in order."""
        self.rows.refuse_on_loop()
        return self._catalog.routes.first_policies(limit, patterns)

    def under_release(self) -> frozenset[tuple[str, str]]:
        """Return (policy, digest) that must stay resident: canary, champion and baseline of each release.

        A release's revision is among them from its approval on, so that users meet a warm canary.

        Revisions of another base are not: other engines serve them. Its size grows with the running releases,
        not with the routes. While the catalog is unreadable it returns the last known set.
        """
        try:
            self.rows.look()
            if self._released[0] != (seen := self.rows.seen):
                self._released = seen, self._read_released()
        except GraftworkError as error:
            log.warning("Cannot read the running releases; using the last known ones: %s", error)
        return self._released[1]

    @property
    def last_released(self) -> frozenset[tuple[str, str]]:
        """Return what `under_release` last returned, without a look."""
        return self._released[1]

    def _read_released(self) -> frozenset[tuple[str, str]]:
        self.rows.refuse_on_loop()
        revisions: set[tuple[str, str]] = set()
        for release in self._catalog.releases.all(open_only=True):
            route = self._route(release.policy)
            if route is None:
                continue
            if self.rows.is_unread(("route", release.policy)):
                raise ServiceError(f"The route of {release.policy!r} is unreadable.")
            # Before its approval only probe and scorer use a candidate, and they can wait.
            candidate = release.revision if release.step in WARM_STEPS else None
            digests = (route.canary, candidate, route.champion, release.baseline)
            ours = (one for one in digests if one and self._is_ours(release.policy, one))
            revisions.update((release.policy, one) for one in ours)
        return frozenset(revisions)

    def _is_ours(self, policy: str, digest: str) -> bool:
        """Return whether a revision is not known to be of another base, which other engines serve."""
        try:
            return self._standing(policy, digest).revision.base == self._base_digest
        except NotFound:
            return True

    @property
    def seen(self) -> int:
        """Return a number that grows when changes of the catalog were noted."""
        return self.rows.seen

    @property
    def unread_s(self) -> float:
        """Return for how long the catalog has been unreadable (seconds), as of the newest look."""
        return self.rows.unread_s()

    def is_stale(self) -> bool:
        """Return whether the catalog has been unreadable for `STALE_S`, so that no canary is served."""
        self.rows.look()
        return self.unread_s > STALE_S

    def _route(self, policy: str) -> Route | None:
        key = "route", policy
        route: Route | None = self.rows.find(policy, key, lambda: self._catalog.routes.get(policy))
        return route

    def _standing(self, policy: str, digest: str) -> Standing:
        def read() -> Standing:
            row = self._catalog.revisions.standing(policy, digest)
            if row is None:
                raise NotFound(f"Policy {policy!r} has no revision {digest[:DIGEST12]!r} in the catalog.")
            return row

        if len(digest) < DIGEST12:
            # Not cached: a new revision may make a short prefix ambiguous.
            self.rows.refuse_on_loop()
            try:
                return read()
            except ServiceError as error:
                raise self.rows.unreadable(error) from None
        asked = _row_of(policy, digest)
        standing: Standing = self.rows.read(policy, asked, read)
        if len(digest) < len(standing.revision.digest):
            # The gateway looks up the whole digest next.
            self.rows.share(asked, _row_of(policy, standing.revision.digest))
        return standing

    def _refuse_other_base(self, revision: Revision) -> None:
        if revision.base != self._base_digest:
            raise AdapterError(
                f"{served_name(revision.policy, revision.digest)} belongs to base {revision.base[:12]}, but "
                f"this engine serves base {self._base_digest[:12]}. Use an engine with that base, or train "
                "the policy on this one."
            )

    def _has_tombstone(self, policy: str, digest: str) -> bool:
        try:
            return self._standing(policy, digest).tombstone is not None
        except NotFound:
            # A row with a tombstone in force never expires.
            return False

    def _purged(self, model: str, policy: str) -> Gone | None:
        purged = self.rows.find(policy, ("purged", policy), lambda: self._catalog.purges.find(policy))
        if purged is None:
            return None
        return Gone(f"{model[:SHOWN]} was purged by {purged['by']}; its adapters are permanently deleted.")

    def _follow(self, route: Route, unit: str) -> Target:
        arms = [(CANARY, route.canary)] if in_canary(route, unit) else []
        if arms and route.champion:
            # Who takes the canary's place once the catalog is silent must be known by then.
            self._has_tombstone(route.policy, route.champion)
        for arm, digest in [*arms, ("champion", route.champion)]:
            if digest and not self._has_tombstone(route.policy, digest):
                read = ("route", route.policy), _row_of(route.policy, digest)
                if arm == CANARY and self.rows.unread_s(*read) > STALE_S:
                    continue
                return Target(route.policy, digest, arm, route.version, route.plain_units)
        return Target(route.policy, None, "base", route.version, route.plain_units)


def withheld_for(standing: Standing) -> str | None:
    """Return why a revision is not served (rolled back or retired), or None if it is."""
    if standing.tombstone is not None:
        return f"was rolled back: {standing.tombstone} `graftwork rollback --lift` makes it available again."
    if standing.revision.retired_at is not None:
        reason = standing.revision.retired_reason
        return f"was retired: {reason} `graftwork adapters retire --off` makes it available again."
    return None


def _row_of(policy: str, digest: str) -> Hashable:
    return "revision", policy, digest
