"""Publication of one revision: its bytes go into the store, then a catalog row commits them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.adapters import packed
from engine.catalog.places import Layout
from engine.catalog.records import Revision, served_name
from engine.catalog.revision_rows import location
from engine.errors import AdapterError, Conflict, DamagedBytes, MissingBytes, Moved, NotFound
from engine.publishing.ownership import claim
from engine.store.segments import is_whole

if TYPE_CHECKING:
    from engine.adapters.revision import Manifest, Tensors
    from engine.base.families import BaseShapes
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

# Attempts to publish a row whose shared bytes move meanwhile.
ATTEMPTS = 5


@dataclass(frozen=True)
class PlacedRevision:
    """A revision's row before its commit; `is_shared`: another row already names its bytes.

    `layout` is committed with it; None: the catalog has it.
    """

    row: Revision
    is_shared: bool
    layout: Layout | None = None


def publish(
    catalog: "Catalog", store: "Store", place: Callable[[], PlacedRevision], **changes: Any
) -> Revision:
    """Commit the row of what `place` puts into the store, with `changes` to its fields.

    `place` is called again when shared bytes moved meanwhile; `Conflict` when they keep moving.
    """
    try:
        for _ in range(ATTEMPTS):
            placed = place()
            row = replace(placed.row, **changes)
            with suppress(Moved):
                layouts = [placed.layout] if placed.layout else []
                catalog.revisions.add_many([row], [row.digest] if placed.is_shared else [], layouts)
                return row
    finally:
        store.committed()
    raise Conflict(
        f"The bytes of {served_name(row.policy, row.digest)} moved {ATTEMPTS} times while it was published. "
        "Run this again."
    )


def put(
    catalog: "Catalog",
    store: "Store",
    tensors: "Tensors",
    manifest: "Manifest",
    dtype: "torch.dtype",
    base: "BaseShapes",
    owner: str,
    now: float,
) -> PlacedRevision:
    """Return the row of a revision whose bytes in the store are whole; append them where they are not.

    The adapter of `base` is packed in `dtype`; whole bytes of another policy's row are shared. The row of a
    new revision, exported and created at `now` (epoch seconds), is not committed yet; its layout neither. A
    known revision with damaged or missing bytes or layout gets new ones.
    """
    copies = catalog.revisions.copies(manifest.policy, manifest.digest)
    known, is_held = copies[0] if copies and copies[0][0].policy == manifest.policy else (None, False)
    if known and store.check([location(known)]) == [None] and _has_layout(catalog, known):
        if is_held:
            catalog.quarantine.release(known.policy, known.digest)
        return PlacedRevision(known, is_shared=True)
    if store.claimed_by != catalog.id:
        claim(catalog, store)
    whole = packed.pack(tensors, dtype, base.fused)
    payload = whole.tobytes()
    # A known revision gets bytes of its own: those of another row could be gone before its row names them.
    others = [] if known else dict.fromkeys(location(row) for row, is_held in copies if not is_held)
    whole_copies = (at for at in others if is_whole(payload, at.checksum) and store.check([at]) == [None])
    shared = next(whole_copies, None)
    row = Revision(
        **(shared or store.append(payload))._asdict(),
        state="exported",
        policy=manifest.policy,
        digest=manifest.digest,
        base=manifest.base_digest,
        parent=manifest.parent,
        step=manifest.step,
        rank=manifest.rank,
        bytes=manifest.bytes,
        layout=whole.layout.digest,
        owner=owner,
        created_at=now,
    )
    layout = Layout(row.layout, whole.layout.to_json())
    if known is None:
        return PlacedRevision(row, shared is not None, layout)
    # Before a row that is served names it.
    catalog.layouts.add(layout.digest, layout.body)
    return PlacedRevision(catalog.places.replace(row), is_shared=True)


def _has_layout(catalog: "Catalog", row: Revision) -> bool:
    try:
        return bool(catalog.layouts.get(row.layout))
    except (AdapterError, NotFound):
        return False


def stored_tensors(catalog: "Catalog", store: "Store", row: Revision) -> "Tensors":
    """Return a revision's canonical tensors, unpacked from the store. Raises as `stored_packed`."""
    return packed.unpack(stored_packed(catalog, store, row))


def stored_packed(catalog: "Catalog", store: "Store", row: Revision) -> packed.Packed:
    """Return a revision's packed form from the store.

    Raises `DamagedBytes` or `MissingBytes` for its bytes, `AdapterError` or `NotFound` for its layout.
    """
    try:
        payload = store.read(location(row))
    except (DamagedBytes, MissingBytes):
        # Compaction may have moved them since the row was read.
        before, row = row, catalog.revisions.get(row.policy, row.digest)
        if location(row) == location(before):
            raise
        payload = store.read(location(row))
    layout = packed.PackedLayout.from_json(catalog.layouts.get(row.layout))
    return packed.Packed(layout, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
