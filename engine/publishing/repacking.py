"""Repacking of a store: revisions whose packed form is outdated are packed again as the current code does.

It goes by batches of at most a page of rows: the new bytes are appended with one fsync, then the rows move in
one transaction. After a kill before that, the rows name their old, whole bytes, and the new ones are garbage.
A damaged revision is reported by itself and does not hold up its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.adapters import packed
from engine.adapters.packed_check import check_layout
from engine.base.families import BaseShapes
from engine.catalog.records import Revision
from engine.errors import AdapterError, BaseModelError, GraftworkError, MissingBytes, NotFound
from engine.publishing.maintenance import BATCH_BYTES, OnPage, Report, pages, quarantine, silent
from engine.publishing.ownership import require
from engine.publishing.publish import stored_tensors
from engine.store.segments import checksum_of

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

# (base, layout) -> the base's fused modules, when the layout is outdated; else None.
Differs = Callable[[str, str], dict[str, tuple[str, ...]] | None]
LAYOUTS = 64


def repack(catalog: "Catalog", store: "Store", on_page: OnPage = silent) -> Report:
    """Pack revisions again whose packed form is outdated; their digests stay.

    Raises `ServiceError` when store or catalog cannot be written; what was moved by then stays moved.
    """
    require(catalog, store)
    report, work = Report("repack"), _Repacking(catalog, store)
    for rows in pages(catalog):
        batch = _Batch()
        for row in rows:
            report.revisions += 1
            # Rows of one adapter are adjacent and share its bytes: no batch ends among them.
            if batch.size >= BATCH_BYTES and not batch.has(row):
                work.commit(batch, report)
                batch = _Batch()
            work.add(batch, row, report)
        work.commit(batch, report)
        on_page(report)
    return report


@dataclass
class _Batch:
    """Newly packed bytes by checksum, and the rows that are to name them, still without their place."""

    payloads: dict[str, memoryview] = field(default_factory=dict)
    rows: list[Revision] = field(default_factory=list)
    # Layout and checksum of an adapter's new form, by its digest and the old layout.
    forms: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    size: int = 0

    def has(self, row: Revision) -> bool:
        """Say whether the batch ends with rows of this one's adapter."""
        return bool(self.rows) and self.rows[-1].digest == row.digest


class _Repacking:
    """A run over one catalog and its store."""

    def __init__(self, catalog: "Catalog", store: "Store"):
        self._catalog, self._store = catalog, store
        self._differs = _differs(catalog)
        # Layouts that this run has added.
        self._layouts: set[str] = set()

    def add(self, batch: _Batch, row: Revision, report: Report) -> None:
        """Pack a row's bytes into the batch if their form is outdated; report faults."""
        try:
            fused = self._differs(row.base, row.layout)
            if fused is None:
                return
            if (row.digest, row.layout) not in batch.forms:
                self._pack(batch, row, fused)
                report.bytes += row.length
            layout, checksum = batch.forms[row.digest, row.layout]
            batch.rows.append(replace(row, layout=layout, checksum=checksum))
        except (AdapterError, MissingBytes) as error:
            quarantine(self._catalog, self._store, row, error, report)
        except BaseModelError as error:
            report.add_unreadable(row, str(error))
        except NotFound as error:
            # Its layout is missing; or the row itself expired meanwhile.
            if self._catalog.revisions.find(row.policy, row.digest):
                report.add_damage(row, str(error))

    def commit(self, batch: _Batch, report: Report) -> None:
        """Append and fsync the batch's bytes, then point its rows at them."""
        try:
            placed = self._store.append_many(list(batch.payloads.values()), list(batch.payloads))
            places = {at.checksum: at._asdict() for at in placed}
            # The new bytes are whole wherever a row's old ones lie by now; a deleted row stays deleted.
            report.moved += self._catalog.places.replace_many(
                [replace(row, **places[row.checksum]) for row in batch.rows]
            )
        finally:
            self._store.committed()

    def _pack(self, batch: _Batch, row: Revision, fused: dict[str, tuple[str, ...]]) -> None:
        """Pack a revision's bytes in the current form. Raises `DamagedBytes` or `MissingBytes`."""
        tensors = stored_tensors(self._catalog, self._store, row)
        whole = packed.pack(tensors, next(iter(tensors.values())).dtype, fused)
        payload, digest = whole.tobytes(), whole.layout.digest
        if digest not in self._layouts:
            self._catalog.layouts.add(digest, whole.layout.to_json())
            self._layouts.add(digest)
        checksum = checksum_of(payload)
        if checksum not in batch.payloads:
            batch.payloads[checksum] = payload
            batch.size += len(payload)
        batch.forms[row.digest, row.layout] = digest, checksum


def _differs(catalog: "Catalog") -> Differs:
    """Return a function that gives a base's fused modules when a layout is outdated, else None."""

    @cache
    def shapes(base: str) -> BaseShapes:
        try:
            return BaseShapes.read(Path(catalog.bases.get(base).path))
        except (GraftworkError, OSError) as error:
            raise BaseModelError(f"The base {base[:12]} cannot be read: {error}") from None

    @lru_cache(LAYOUTS)
    def differs(base: str, digest: str) -> dict[str, tuple[str, ...]] | None:
        layout = packed.PackedLayout.from_json(catalog.layouts.get(digest))
        check_layout(layout)
        fused = dict(shapes(base).fused)
        zeros = packed.Packed(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
        today = packed.pack(packed.unpack(zeros), layout.dtype, fused)
        return fused if today.layout != layout else None

    return differs
