"""Keeping a store whole and small: verify, gc and compact; what packs anew is in `repacking`.

Each goes through catalog and store page by page, may be killed at any byte, and can be run again and beside
writers and readers. Bytes come first and are fsynced, rows move in one transaction, and a segment goes
only when no writer holds it and, within the transaction that asks, no row names it. Nothing asks a clock.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.adapters import packed
from engine.adapters.packed_check import check_layout
from engine.catalog.records import Revision
from engine.errors import AdapterError, DamagedBytes, GraftworkError, MissingBytes, NotFound
from engine.publishing.ownership import require
from engine.publishing.publish import location
from engine.settings.params import served_name
from engine.store.segments import Location

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

PAGE_ROWS = 1_000
# What is copied between two fsyncs, and how many rows one transaction moves at most.
BATCH_BYTES = 64 << 20
BATCH_ROWS = 4_096
# Live bytes that are copied before the segments they lay in go.
GROUP_BYTES = 4 << 30
# Segments that are claimed at once, each by an open file, and looked for in one walk of the rows.
CLAIMED = 256
# Damaged and unreadable revisions that a report names; it counts them all.
LISTED = 100
LAYOUTS = 64


@dataclass
class Report:
    """What was looked at and done. `bytes` were read, `freed` are those of the `removed` segments.

    `held` counts segments that a living writer keeps from us, the next run takes them; `named` those that
    a row still names, as one whose bytes are damaged and cannot be moved does. `unreadable` are revisions
    whose bytes or base cannot be read here: they stay as they are.
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
        self.damaged += 1
        self._show(row, fault)

    def add_unreadable(self, row: Revision, fault: str) -> None:
        self.unreadable += 1
        self._show(row, fault)

    def _show(self, row: Revision, fault: str) -> None:
        if len(self.examples) < LISTED:
            self.examples.append({"revision": served_name(row.policy, row.digest), "fault": fault})


OnPage = Callable[[Report], object]
# Where bytes lie and whose digest they are; one revision of those that name them so.
Batch = dict[tuple[Location, str], Revision]


def silent(report: Report) -> None:
    """Show nobody how far it is."""


def verify(catalog: "Catalog", store: "Store", on_page: OnPage = silent) -> Report:
    """Read every revision's bytes where they lie; quarantine what is damaged, release what is whole again."""
    require(catalog, store)
    report, layout_fault = Report("verify"), _layout_faults(catalog)
    for rows in pages(catalog):
        faults = store.check([location(row) for row in rows])
        held = catalog.quarantine.among([row.digest for row in rows])
        for row, fault in zip(rows, faults, strict=True):
            found = fault or layout_fault(row.layout, row.length)
            if found:
                quarantine(catalog, store, row, found, report)
            elif (row.policy, row.digest) in held:
                catalog.quarantine.release(row.policy, row.digest)
                report.healed += 1
            report.revisions += 1
            report.bytes += row.length
        on_page(report)
    return report


def gc(catalog: "Catalog", store: "Store", on_page: OnPage = silent) -> Report:
    """Remove segments that no row names and no living writer holds, and drafts that a crash left."""
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
    """Rewrite segments and remove them: those of which less than `threshold` is live, or `everything`.

    With 1.0 each that holds any bytes which no row names. `segments` are rewritten beside those, however
    much of them is live.
    """
    require(catalog, store)
    report = Report("compact")
    # What is copied goes to a segment of its own, never to the end of one that is to leave.
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
    # What is to be copied may need the room that these leave.
    _drop(catalog, store, {name: size for name, size in chosen.items() if name not in used}, report, on_page)
    for group in _groups({name: size for name, size in chosen.items() if name in used}, used):
        _move_out(catalog, store, group, report, on_page)
        _drop(catalog, store, group, report, on_page)
    return report


def _groups(chosen: dict[str, int], used: dict[str, int]) -> Iterator[dict[str, int]]:
    """Cut segments into groups of which so much is live that each is worth a walk of the catalog."""
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
    """Yield every revision, a page at a time, those of one digest next to each other."""
    after: tuple[str, str] | None = None
    while rows := catalog.revisions.scan(after, PAGE_ROWS):
        yield rows
        after = rows[-1].digest, rows[-1].policy


def _drop(catalog: "Catalog", store: "Store", sizes: dict[str, int], report: Report, on_page: OnPage) -> None:
    """Remove those of these segments that no row names; each is claimed until it is gone."""
    names = list(sizes)
    for at in range(0, len(names), CLAIMED):
        with ExitStack() as claims:
            free = [name for name in names[at : at + CLAIMED] if claims.enter_context(store.claim(name))]
            report.held += len(names[at : at + CLAIMED]) - len(free)
            unused = catalog.places.unused_segments(free)
            report.named += len(free) - len(unused)
            for segment in sorted(unused):
                store.remove(segment)
                report.removed += 1
                report.freed += sizes[segment]
        on_page(report)


def _move_out(
    catalog: "Catalog", store: "Store", chosen: dict[str, int], report: Report, on_page: OnPage
) -> None:
    """Copy what rows name in the chosen segments to new ones, and let the rows name that."""
    batch: Batch = {}
    size = 0
    # Its digest's other rows have moved with it, whatever the page that was read before says.
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
    # Identical bytes are written once, wherever they lay.
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
    """Keep a damaged revision from being served, unless its row is gone or names other bytes by now.

    Bytes that are only missing are no damage: nothing wrong can be served, and they may come back.
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
    """Return what says why a layout, or a length under it, cannot be right; None when it is."""

    @lru_cache(LAYOUTS)
    def nbytes(digest: str) -> int | GraftworkError:
        try:
            layout = packed.PackedLayout.from_json(catalog.layouts.get(digest))
            check_layout(layout)
            return layout.nbytes
        except (AdapterError, NotFound) as error:
            return error

    def fault(digest: str, length: int) -> GraftworkError | None:
        found = nbytes(digest)
        if isinstance(found, GraftworkError):
            return found
        if found == length:
            return None
        return AdapterError(f"expected {found} bytes by its layout, found {length}.")

    return fault
