"""Whose store it is. What no row of a catalog names is garbage in its store, so a store has one catalog.

A catalog has an id of its own, and the store says which one it belongs to. With an empty catalog in place of
a lost one, or a store that is not mounted, nothing is then removed and nothing is taken for damaged.
"""

from typing import TYPE_CHECKING

from engine.errors import Conflict
from engine.store.segments import CATALOG_ID

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

# Of a store's segments, so many must be named by a catalog that takes it over: what crashes leave is less.
NAMED_SHARE = 0.5


def claim(catalog: "Catalog", store: "Store") -> None:
    """Let a store belong to a catalog before its bytes go there; raises `Conflict` if it is another's."""
    if store.claimed_by == catalog.id:
        return
    owner = store.catalog_id()
    # One from before stores said it may be another's: that is found out by who would remove something.
    if owner is None and next(store.segments(), None) is None:
        owner = _take_over(catalog, store)
    if owner not in (None, catalog.id):
        raise _others(store, owner)
    store.claimed_by = catalog.id


def require(catalog: "Catalog", store: "Store") -> None:
    """Raise `Conflict` unless the store is this catalog's, also where nobody has said so yet."""
    owner = store.catalog_id() or _take_over(catalog, store)
    if owner != catalog.id:
        raise _others(store, owner)


def _take_over(catalog: "Catalog", store: "Store") -> str:
    """Let a store that says nothing belong to a catalog, if its segments say the same; return to which."""
    segments = {name for name, _ in store.segments()}
    named = catalog.places.bytes_by_segment().keys()
    if (segments or named) and len(named & segments) < NAMED_SHARE * max(1, len(segments)):
        raise Conflict(
            f"The store {store.place} has {len(segments)} segments. The catalog {catalog.label} names "
            f"{len(named & segments)} of them, and {len(named - segments)} others. Nothing was changed. "
            "See that `store.url` and `catalog.url` are those that belong together, and that the store's "
            f"disk is mounted. If they are, write {catalog.id} into {CATALOG_ID} there."
        )
    return store.belong_to(catalog.id)


def _others(store: "Store", owner: str | None) -> Conflict:
    return Conflict(
        f"The store {store.place} belongs to another catalog, whose id is {owner}. Nothing was changed. See "
        "that `store.url` and `catalog.url` are those that belong together. If that catalog is gone for "
        f"good, its revisions are gone with it: remove {CATALOG_ID} there, or take another place."
    )
