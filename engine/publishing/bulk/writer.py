"""The writer of a bulk registration: a thread hashes and packs batches, one appends bytes, one commits rows.

While the catalog commits the rows of some batches, the disk takes the bytes of the next, and the one after it
is hashed and packed. Bytes are fsynced before the rows that name them are committed, in the order of batches.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import compress, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from engine.catalog.batches import RevisionBatch
from engine.errors import Conflict, Moved, Purged
from engine.publishing.bulk.batches import AdapterBatch, BatchForm, Tables, batch_of
from engine.publishing.bulk.entries import BulkRow, Registered, purged, refusal
from engine.publishing.ownership import claim
from engine.publishing.publish import ATTEMPTS

if TYPE_CHECKING:
    from torch import Tensor

    from engine.catalog.catalog import Catalog
    from engine.store.segments import Location, Store

Places = dict[str, "Location"]
# Adapters of a run after which hashes are compiled.
MANY = 20_000
# Rows of one transaction, about; other writers wait for it.
ROWS = 16_384


@dataclass(frozen=True)
class PlacedBatch:
    """A batch whose bytes are in the store: its rows with their digests, and where each digest's bytes lie.

    `known` places existed before, `appended` ones are this batch's own. `damaged` digests share no bytes.
    `batch` is kept while known bytes may still move; None when there are none.
    """

    form: BatchForm
    batch: AdapterBatch | None
    rows: list[BulkRow]
    digests: list[str]
    damaged: Set[str]
    known: Places
    appended: Places

    @property
    def locations(self) -> list["Location"]:
        """Return where each row's bytes lie."""
        places = self.known | self.appended
        return [places[digest] for digest in self.digests]

    def only(self, kept: Sequence[bool]) -> "PlacedBatch":
        """Return the batch with the rows that are `kept`."""
        return replace(self, rows=list(compress(self.rows, kept)), digests=list(compress(self.digests, kept)))

    def without(self, policies: Collection[str]) -> "PlacedBatch":
        """Return the batch without the rows of these policies."""
        return self.only([row.policy not in policies for row in self.rows])


class Writer:
    """Appends batches to the store and commits them, in the order in which they come.

    `place` and `commit` return at once. Until `settle` the store's segments are locked against gc and
    compaction, so the store must hold no other bytes without rows. `close` waits until everything is written.
    """

    def __init__(self, catalog: "Catalog", store: "Store", base_digest: str, owner: str, now: float):
        claim(catalog, store)
        self._catalog, self._store = catalog, store
        self._base_digest, self._owner, self._now = base_digest, owner, now
        self._layouts: set[str] = set()
        # Bytes whose rows are not committed yet: later batches share them.
        self._pending: Places = {}
        # Batches whose bytes were appended again because shared ones had moved.
        self._again: list[PlacedBatch] = []
        self.tables = Tables()
        self._named = 0
        self._names = ThreadPoolExecutor(1, "register-names")
        self._bytes = ThreadPoolExecutor(1, "register-bytes")
        self._rows = ThreadPoolExecutor(1, "register-rows")

    def close(self) -> None:
        """Wait until everything handed over is written, then release the segments."""
        # The thread of the rows may still call that of the bytes.
        self._rows.shutdown()
        self._bytes.shutdown()
        self._names.shutdown()
        self.settle()
        if self._named > MANY:
            self._catalog.shorten_log()

    def place(self, form: BatchForm, values_ND: "Tensor", rows: list[BulkRow]) -> Future[PlacedBatch]:
        """Append N adapters of D elements to the store; `commit` registers them."""
        return self._bytes.submit(self._place, self._names.submit(self._name, form, values_ND), rows)

    def commit(self, given: Sequence[Future[PlacedBatch]]) -> "Future[list[Registered]]":
        """Register batches; the result has one item for each entry.

        Batches after one that could not be stored are left out.
        """
        return self._rows.submit(self._commit, given)

    def settle(self) -> None:
        """Release the store's segments. Only when every result is there."""
        self._store.committed()

    # In the thread that hashes

    def _name(self, form: BatchForm, values_ND: "Tensor") -> AdapterBatch:
        self._named += len(values_ND)
        batch = batch_of(form, values_ND, self.tables, compiled=self._named > MANY)
        self.tables.give(values_ND)
        return batch

    # In the thread that appends bytes

    def _place(self, named: "Future[AdapterBatch]", rows: list[BulkRow]) -> PlacedBatch:
        batch = named.result()
        self._add_layout(batch.form)
        damaged = self._damaged(rows, batch.digests)
        placed = self._append(PlacedBatch(batch.form, batch, rows, batch.digests, damaged, {}, {}))
        if placed.batch is None:
            self.tables.give(batch.payload_NB)
        return placed

    def _append(self, placed: PlacedBatch) -> PlacedBatch:
        """Look up where each digest's bytes lie, and append those that the store lacks."""
        batch, appended = placed.batch, placed.appended
        if batch is None:
            return placed
        # A part of a batch looks up its own bytes only: a later part may have to append its own again too.
        rows = set(placed.digests)
        wanted = [digest for digest in placed.digests if digest not in placed.damaged]
        # In this order: what has left `_pending` by now is in the catalog.
        pending = {digest: at for digest in wanted if (at := self._pending.get(digest))}
        known = {digest: at for digest, at in pending.items() if digest not in appended}
        known |= self._whole(self._catalog.places.find(wanted))
        places = known | appended
        missing: dict[str, int] = {}
        for i, (digest, checksum) in enumerate(zip(batch.digests, batch.checksums, strict=True)):
            if digest not in rows:
                continue
            at = places.get(digest)
            # Bytes of another packing are other bytes: this batch's layout does not describe them.
            if at is None or (at.checksum, at.length) != (checksum, batch.form.layout.nbytes):
                missing[digest] = i
        if missing:
            payloads = batch.payloads()
            numbers = missing.values()
            found = self._store.append_many(
                [payloads[i] for i in numbers], [batch.checksums[i] for i in numbers], cached=False
            )
            appended = appended | dict(zip(missing, found, strict=True))
        self._pending.update(appended)
        return replace(placed, batch=batch if known else None, known=known, appended=appended)

    def _whole(self, places: Places) -> Places:
        """Return the places whose bytes are whole: a row may name bytes that the disk has lost since."""
        if not places:
            return places
        faults = self._store.check(list(places.values()))
        return {digest: at for (digest, at), fault in zip(places.items(), faults, strict=True) if not fault}

    def _damaged(self, rows: list[BulkRow], digests: list[str]) -> Set[str]:
        """Return the digests of quarantined rows: these get bytes of their own."""
        held = self._catalog.quarantine.among(digests)
        if not held:
            return frozenset()
        return {digest for row, digest in zip(rows, digests, strict=True) if (row.policy, digest) in held}

    def _add_layout(self, form: BatchForm) -> None:
        digest = form.layout.digest
        if digest not in self._layouts:
            self._catalog.layouts.add(digest, form.layout.to_json())
            self._layouts.add(digest)

    # In the thread that commits rows

    def _commit(self, given: Sequence[Future[PlacedBatch]]) -> list[Registered]:
        forms = defaultdict[BatchForm, list[PlacedBatch]](list)
        for one in takewhile(lambda one: one.exception() is None, given):
            forms[one.result().form].append(one.result())
        try:
            parts = [(form, part) for form, placed in forms.items() for part in _parts(placed)]
            found = [one for form, part in parts for one in self._register(form, part)]
            return sorted(found, key=attrgetter("position")) if len(parts) > len(forms) else found
        finally:
            # Also of batches that are left out: no later batch may count on their rows.
            self._forget(one.result() for one in given if one.exception() is None)
            self._forget(self._again)
            self._again.clear()

    def _register(self, form: BatchForm, placed: list[PlacedBatch]) -> list[Registered]:
        refused: list[Registered] = []
        for _ in range(ATTEMPTS):
            rows = [row for one in placed for row in one.rows]
            batch = self._revisions(form, rows, placed)
            try:
                new = self._catalog.batches.add(batch, _shared(placed))
            except Moved:
                for number, one in enumerate(placed):
                    placed[number] = self._bytes.submit(self._append, one).result()
                    self._again.append(placed[number])
            except Purged as error:
                # Purged during this run; the other policies go on.
                refused += [refusal(row, purged(row.policy)) for row in rows if row.policy in error.policies]
                placed = [one.without(error.policies) for one in placed]
            else:
                self._heal(batch, new, placed)
                positions = [row.position for row in rows]
                return refused + list(map(Registered, positions, batch.policies, batch.digests, new))
        raise Conflict(
            f"The bytes that {len(rows)} revisions share moved {ATTEMPTS} times. Register them again when "
            "`graftwork store compact` has ended."
        )

    def _forget(self, placed: Iterable[PlacedBatch]) -> None:
        """Look these bytes up in the catalog from now on: their rows are there, or will not come."""
        for one in placed:
            for digest in one.appended:
                self._pending.pop(digest, None)

    def _heal(self, batch: RevisionBatch, new: list[bool], placed: list[PlacedBatch]) -> None:
        """Point known rows without whole bytes at those that were just appended."""
        if all(new):
            return
        own = {digest for one in placed for digest in one.appended.keys() - one.known.keys()}
        keys = list(zip(batch.policies, batch.digests, strict=True))
        done = set(compress(keys, new))
        for number, key in enumerate(keys):
            if key[1] in own and key not in done:
                self._catalog.places.replace(batch.row(number))
                done.add(key)

    def _revisions(self, form: BatchForm, rows: list[BulkRow], placed: list[PlacedBatch]) -> RevisionBatch:
        at = [location for one in placed for location in one.locations]
        return RevisionBatch(
            base=self._base_digest,
            rank=form.rank,
            bytes=form.nbytes,
            layout=form.layout.digest,
            length=form.layout.nbytes,
            owner=self._owner,
            created_at=self._now,
            policies=[row.policy for row in rows],
            digests=[digest for one in placed for digest in one.digests],
            parents=[row.parent for row in rows],
            steps=[row.step for row in rows],
            segments=[location.segment for location in at],
            offsets=[location.offset for location in at],
            checksums=[location.checksum for location in at],
        )


def _parts(placed: list[PlacedBatch]) -> Iterator[list[PlacedBatch]]:
    """Split batches into parts of neighbouring digests, a transaction each.

    Digests are random, so that each row changes a page of the index, which is written as a whole. With four
    times as many rows to choose neighbours from, four times as many change the same page.
    """
    count = max(1, sum(len(one.rows) for one in placed) // ROWS)
    if count == 1:
        yield placed
        return
    numbers = [[int(digest[:4], 16) * count >> 16 for digest in one.digests] for one in placed]
    for part in range(count):
        yield [
            one.only([number == part for number in each]) for one, each in zip(placed, numbers, strict=True)
        ]


def _shared(placed: list[PlacedBatch]) -> Set[int]:
    """Return the numbers of the rows whose bytes none of these batches appended."""
    if not any(one.known for one in placed):
        return frozenset()
    appended = {at for one in placed for at in one.appended.values()}
    locations = (at for one in placed for at in one.locations)
    return {number for number, at in enumerate(locations) if at not in appended}
