"""A revision's bytes into the store, and the catalog row that would commit them."""

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from engine.adapters import packed
from engine.adapters.catalog_schema import Revision
from engine.adapters.store import Location
from engine.errors import AdapterError, NotFound

if TYPE_CHECKING:
    from engine.adapters.catalog import Catalog
    from engine.adapters.families import BaseShapes
    from engine.adapters.revision import Manifest, Tensors
    from engine.adapters.store import Store


def put(
    catalog: "Catalog",
    store: "Store",
    tensors: "Tensors",
    manifest: "Manifest",
    dtype: "torch.dtype",
    base: "BaseShapes",
    owner: str,
    now: float,
) -> Revision:
    """Return the row of a revision whose bytes in the store are whole; append them where they are not.

    A known revision whose bytes are damaged or missing is moved to new ones. A new one's row is not
    committed yet; arguments as those of `append`.
    """
    given = (catalog, store, tensors, manifest, dtype, base, owner, now)
    try:
        known = catalog.revision(manifest.policy, manifest.digest)
    except NotFound:
        return append(*given)
    with suppress(AdapterError):
        store.read(location(known))
        return known
    return catalog.move_revision(append(*given))


def append(
    catalog: "Catalog",
    store: "Store",
    tensors: "Tensors",
    manifest: "Manifest",
    dtype: "torch.dtype",
    base: "BaseShapes",
    owner: str,
    now: float,
) -> Revision:
    """Pack the tensors of an adapter of `base` in `dtype`, append them and add their layout.

    Return the row that would commit them: an exported revision's, made at `now` (epoch seconds).
    """
    whole = packed.pack(tensors, dtype, base.fused)
    at = store.append(whole.tobytes())
    catalog.add_layout(whole.layout.digest, whole.layout.to_json())
    return Revision(
        policy=manifest.policy,
        digest=manifest.digest,
        base=manifest.base_digest,
        parent=manifest.parent,
        step=manifest.step,
        rank=manifest.rank,
        bytes=manifest.bytes,
        layout=whole.layout.digest,
        segment=at.segment,
        offset=at.offset,
        length=at.length,
        checksum=at.checksum,
        state="exported",
        owner=owner,
        created_at=now,
    )


def stored_tensors(catalog: "Catalog", store: "Store", row: Revision) -> "Tensors":
    """Return the canonical tensors of a revision as its packed bytes have them.

    Raises `AdapterError` when the bytes are missing or damaged.
    """
    payload = store.read(location(row))
    layout = packed.Layout.from_json(catalog.layout(row.layout))
    return packed.unpack(packed.Packed(layout, torch.frombuffer(bytearray(payload), dtype=torch.uint8)))


def location(row: Revision) -> Location:
    """Return where a row says that its bytes lie."""
    return Location(row.segment, row.offset, row.length, row.checksum)
