"""Maintenance of a store: verify, garbage collection and compaction; `repacking` has the fourth operation.

Each goes through catalog and store page by page, is crash-safe and idempotent, and runs beside writers and
readers. Bytes are fsynced first, rows move in one transaction, and a segment is removed only when no writer
holds it and no row names it. No decision depends on a clock.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.adapters import packed
from engine.adapters.packed_check import check_layout
from engine.catalog.leases import BACKUP
from engine.catalog.records import Revision, served_name
from engine.catalog.revision_rows import location
from engine.errors import AdapterError, DamagedBytes, GraftworkError, MissingBytes, NotFound
from engine.publishing.ownership import require
from engine.store.segments import Location

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

PAGE_ROWS = 1_000
# Bytes copied between two fsyncs, and the most rows that one transaction moves.
BATCH_BYTES = 64 << 20
BATCH_ROWS = 4_096
# Live bytes copied before their old segments are removed.
GROUP_BYTES = 4 << 30
# Segments claimed at a time, each by an open file, and looked up in one scan of the rows.
CLAIMED = 256
# The most damaged and unreadable revisions that a report names; it counts them all.
LISTED = 100
LAYOUTS = 64


@dataclass
class Report:
    """The result of an operation. `bytes` were read; `freed` are the bytes of the `removed` segments.

    `held` counts segments that a living writer or a backup holds, which the next run takes; `named` those
    that a row still names, such as one whose damaged bytes cannot be moved. `unreadable` counts revisions
    whose bytes or base cannot be read here; they stay as they are.
    """

    operation: str
    revisions: int = 0
    bytes: int = 0
    moved: int = 0
    removed: int = 0
    freed: int = 0
    held: int = 0
    named: int = 0
    drafts: int = 0
    healed: int = 0
    damaged: int = 0
    unreadable: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)

    def add_damage(self, row: Revision, fault: str) -> None:
        """Count a damaged revision."""
        self.damaged += 1
        self._show(row, fault)

    def add_unreadable(self, row: Revision, fault: str) -> None:
        """Count a revision that cannot be read here."""
        self.unreadable += 1
        self._show(row, fault)

    def _show(self, row: Revision, fault: str) -> None:
        if len(self.examples) < LISTED:
            self.examples.append({"revision": served_name(row.policy, row.digest), "fault": fault})


OnPage = Callable[[Report], object]
# (place, digest) -> one of the revisions that name it.
Batch = dict[tuple[Location, str], Revision]


def silent(report: Report) -> None:
    """Report no progress."""


def verify(catalog: "Catalog", store: "Store", on_page: OnPage = silent) -> Report:
    """Verify every revision's bytes in the store; quarantine damaged ones, release restored ones."""
    require(catalog, store)
    report, layout_fault = Report("verify"), _layout_faults(catalog)
    for rows in pages(catalog):
        faults = store.check([location(row) for row in rows])
        held = catalog.quarantine.among([row.digest for row in rows])
        for row, fault in zip(rows, faults, strict=True):
            reason = fault or layout_fault(row.layout, row.length)
            if reason:
                quarantine(catalog, store, row, reason, report)
            elif (row.policy, row.digest) in held:
                catalog.quarantine.release(row.policy, row.digest)
                report.healed += 1
            report.revisions += 1
            report.bytes += row.length
        on_page(report)
    return report


def gc(catalog: "Catalog", store: "Store", on_page: OnPage = silent) -> Report:
    """Remove segments that no row names and no living writer holds, and drafts left by crashes."""
    require(catalog, store)
    report = Report("gc")
    used = catalog.places.bytes_by_segment().keys()
    unused = {segment: size for segment, size in store.segments() if segment not in used}
    _drop(catalog, store, unused, report, on_page)
    report.drafts = store.clean()
    return report


def compact(
    catalog: "Catalog",
    store: "Store",
    threshold: float = 0.5,
    everything: bool = False,
    segments: Collection[str] = (),
    on_page: OnPage = silent,
) -> Report:
    """Rewrite segments of which less than `threshold` is live, or `everything`, and remove the old ones.

    1.0 takes each segment with any garbage. `segments` are rewritten as well, however much of them is live.
    """
    require(catalog, store)
    report = Report("compact")
    # Copies go to a new segment, never to the end of one that will be removed.
    store.close()
    used = catalog.places.bytes_by_segment()
    chosen = {}
    for segment, size in store.segments():
        if everything or segment in segments or used.get(segment, 0) < threshold * size:
            with store.claim(segment) as is_free:
                if is_free:
                    chosen[segment] = size
                else:
                    report.held += 1
    # The copies may need the room that these free.
    _drop(catalog, store, {name: size for name, size in chosen.items() if name not in used}, report, on_page)
    for group in _groups({name: size for name, size in chosen.items() if name in used}, used):
        _move_out(catalog, store, group, report, on_page)
        _drop(catalog, store, group, report, on_page)
    return report


def _groups(chosen: dict[str, int], used: dict[str, int]) -> Iterator[dict[str, int]]:
    """Split segments into groups with enough live bytes to be worth a scan of the catalog each."""
    group: dict[str, int] = {}
    live = 0
    for segment, size in chosen.items():
        group[segment] = size
        live += used[segment]
        if live >= GROUP_BYTES:
            yield group
            group, live = {}, 0
    if group:
        yield group


def pages(catalog: "Catalog") -> Iterator[list[Revision]]:
    """Yield every revision, page by page, those of one digest next to each other."""
    after: tuple[str, str] | None = None
    while rows := catalog.revisions.scan(after, PAGE_ROWS):
        yield rows
        after = rows[-1].digest, rows[-1].policy


def _drop(catalog: "Catalog", store: "Store", sizes: dict[str, int], report: Report, on_page: OnPage) -> None:
    """Remove those of these segments that no row names; each is claimed until it is gone.

    While a backup runs none is removed: it may still have to copy bytes that a row named when it began.
    """
    names = list(sizes)
    for at in range(0, len(names), CLAIMED):
        with ExitStack() as claims:
            free = [name for name in names[at : at + CLAIMED] if claims.enter_context(store.claim(name))]
            report.held += len(names[at : at + CLAIMED]) - len(free)
            unused = catalog.places.unused_segments(free)
            report.named += len(free) - len(unused)
            # In this order: what no row named before a backup began, its rows do not name either.
            if catalog.leases.is_held(BACKUP):
                report.held += len(unused)
                unused = set()
            for segment in sorted(unused):
                store.remove(segment)
                report.removed += 1
                report.freed += sizes[segment]
        on_page(report)


def _move_out(
    catalog: "Catalog", store: "Store", chosen: dict[str, int], report: Report, on_page: OnPage
) -> None:
    """Copy the live bytes of the chosen segments to new ones, and point the rows there."""
    batch: Batch = {}
    size = 0
    # The other rows of this digest moved with it, though the page was read before that.
    last: tuple[Location, str] | None = None
    seen = 0
    for rows in pages(catalog):
        seen += len(rows)
        report.revisions = max(report.revisions, seen)
        for row in rows:
            at = location(row), row.digest
            if row.segment not in chosen or at == last or at in batch:
                continue
            batch[at] = row
            size += row.length
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
                _move(catalog, store, batch, report)
                batch, size, last = {}, 0, at
        on_page(report)
    _move(catalog, store, batch, report)


def _move(catalog: "Catalog", store: "Store", batch: Batch, report: Report) -> None:
    # Identical bytes are written once.
    payloads: dict[str, bytes] = {}
    whole: list[tuple[Location, str]] = []
    for (at, digest), row in batch.items():
        try:
            if at.checksum not in payloads:
                payloads[at.checksum] = store.read(at)
                report.bytes += at.length
            whole.append((at, digest))
        except (DamagedBytes, MissingBytes) as error:
            quarantine(catalog, store, row, error, report)
    if not whole:
        return
    try:
        placed = store.append_many(list(payloads.values()), list(payloads))
        new = {at.checksum: at for at in placed}
        moves = [(at, new[at.checksum]) for at, _ in whole]
        catalog.places.move(moves, [digest for _, digest in whole])
    finally:
        store.committed()
    report.moved += len(whole)


def quarantine(
    catalog: "Catalog", store: "Store", row: Revision, fault: GraftworkError, report: Report
) -> None:
    """Quarantine a damaged revision, unless its row is gone or names other bytes by now.

    Missing bytes are only reported: nothing wrong can be served, and they may come back.
    """
    now = catalog.revisions.find(row.policy, row.digest)
    if now is None:
        return
    if location(now) != location(row):
        (moved_fault,) = store.check([location(now)])
        if moved_fault is None:
            return
        row, fault = now, moved_fault
    if isinstance(fault, MissingBytes):
        report.add_unreadable(row, str(fault))
        return
    catalog.quarantine.add(row.policy, row.digest, str(fault))
    report.add_damage(row, str(fault))


def _layout_faults(catalog: "Catalog") -> Callable[[str, int], GraftworkError | None]:
    """Return a function that says why a layout, or a length under it, is wrong; None when it is right."""

    @lru_cache(LAYOUTS)
    def nbytes(digest: str) -> int | GraftworkError:
        try:
            layout = packed.PackedLayout.from_json(catalog.layouts.get(digest))
            check_layout(layout)
            return layout.nbytes
        except (AdapterError, NotFound) as error:
            return error

    def fault(digest: str, length: int) -> GraftworkError | None:
        expected = nbytes(digest)
        if isinstance(expected, GraftworkError):
            return expected
        if expected == length:
            return None
        return AdapterError(f"expected {expected} bytes by its layout, found {length}.")

    return fault
