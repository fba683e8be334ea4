"""Ownership of a store: bytes that no catalog row names are garbage, so a store belongs to one catalog.

The store holds its catalog's id. With an empty catalog in place of a lost one, or a store that is not
mounted, nothing is then removed and nothing counts as damaged.
"""

from typing import TYPE_CHECKING

from engine.errors import Conflict
from engine.store.segments import CATALOG_ID

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

# The share of a store's segments that a catalog must name to take it over; crashes leave less garbage.
NAMED_SHARE = 0.5


def claim(catalog: "Catalog", store: "Store") -> None:
    """Claim a store for a catalog before its bytes go there; raises `Conflict` if it is another's."""
    owner = store.catalog_id()
    if owner is None:
        is_empty = next(store.segments(), None) is None
        # An owner writes its id before its first segment. A store with segments and still no id may be
        # another's: `require` checks that before anything is removed.
        owner = _take_over(catalog, store) if is_empty else store.catalog_id()
    if owner not in (None, catalog.id):
        raise _others(store, owner)
    store.claimed_by = catalog.id


def require(catalog: "Catalog", store: "Store") -> None:
    """Raise `Conflict` unless the store is this catalog's; a store without an owner is claimed."""
    owner = store.catalog_id() or _take_over(catalog, store)
    if owner != catalog.id:
        raise _others(store, owner)


def _take_over(catalog: "Catalog", store: "Store") -> str:
    """Claim a store without an owner for a catalog that names its segments; return the owner's id."""
    segments = {name for name, _ in store.segments()}
    named = catalog.places.bytes_by_segment().keys()
    if (segments or named) and len(named & segments) < NAMED_SHARE * max(1, len(segments)):
        raise Conflict(
            f"The store {store.place} has {len(segments)} segments. The catalog {catalog.label} names "
            f"{len(named & segments)} of them, and {len(named - segments)} others. Nothing was changed. "
            "Check that `store.url` and `catalog.url` belong together, and that the store's disk is mounted. "
            f"If so, write {catalog.id} into {CATALOG_ID} in the store."
        )
    return store.belong_to(catalog.id)


def _others(store: "Store", owner: str | None) -> Conflict:
    return Conflict(
        f"The store {store.place} belongs to another catalog, whose id is {owner}. Nothing was changed. "
        "Check that `store.url` and `catalog.url` belong together. If that catalog is lost for good, its "
        f"revisions are lost with it: remove {CATALOG_ID} from the store, or use another store."
    )
