"""Batches of a bulk registration into store and catalog: a thread names them, one takes bytes, one rows.

While the catalog takes the rows of a batch, the disk takes the bytes of the next, and the one after it is
packed and hashed. Bytes are fsynced before the rows that name them are committed, in the order of batches.
"""

from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

from engine.adapters.batches import Batch, Form, batch_of
from engine.adapters.bulk_entries import Registered, Row, refusal
from engine.adapters.catalog_batches import RevisionBatch
from engine.adapters.publishing import ATTEMPTS
from engine.errors import Conflict, Moved, Purged

if TYPE_CHECKING:
    from torch import Tensor

    from engine.adapters.catalog import Catalog
    from engine.adapters.store import Location, Store

Places = dict[str, "Location"]


@dataclass(frozen=True)
class _Placed:
    """A batch whose bytes are in the store: each row with its digest, and where the digests' bytes lie.

    `known` were there before, `appended` are this batch's own. `damaged` digests share no bytes. `batch`
    is kept while known bytes may still move: None when there are none.
    """

    form: Form
    batch: Batch | None
    rows: list[Row]
    digests: list[str]
    damaged: Set[str]
    known: Places
    appended: Places


class Writer:
    """Commits batches in the order in which they come; `write` returns at once.

    Until `settle` the store's segments are held against those who clean up, so it must hold no other
    bytes that wait for their rows. `close` ends it when all that was handed over is written.
    """

    def __init__(self, catalog: "Catalog", store: "Store", base_digest: str, owner: str, now: float):
        self._catalog, self._store = catalog, store
        self._base_digest, self._owner, self._now = base_digest, owner, now
        self._layouts: set[str] = set()
        # Bytes whose rows are on their way: a batch that comes meanwhile shares them.
        self._pending: Places = {}
        self._names = ThreadPoolExecutor(1, "register-names")
        self._bytes = ThreadPoolExecutor(1, "register-bytes")
        self._rows = ThreadPoolExecutor(1, "register-rows")

    def close(self) -> None:
        # The thread of the rows may ask that of the bytes once more.
        self._rows.shutdown()
        self._bytes.shutdown()
        self._names.shutdown()
        self.settle()

    def write(self, form: Form, values_ND: "Tensor", rows: list[Row]) -> "Future[list[Registered]]":
        """Have N adapters of D elements written; the result says what became of each, once committed."""
        named = self._names.submit(batch_of, form, values_ND)
        return self._rows.submit(self._commit, self._bytes.submit(self._place, named, rows))

    def settle(self) -> None:
        """Let go of the store's segments. Only when every result is there."""
        self._store.committed()

    # In the thread of the bytes

    def _place(self, named: "Future[Batch]", rows: list[Row]) -> _Placed:
        batch = named.result()
        self._add_layout(batch.form)
        damaged = self._damaged(rows, batch.digests)
        return self._append(_Placed(batch.form, batch, rows, batch.digests, damaged, {}, {}))

    def _append(self, placed: _Placed) -> _Placed:
        """Look up where each digest's bytes lie, and append those that the store does not have."""
        batch, appended = placed.batch, placed.appended
        if batch is None:
            return placed
        wanted = [digest for digest in batch.digests if digest not in placed.damaged]
        # In this order: what is pending no longer is in the catalog.
        pending = self._pending.copy()
        known = {digest: pending[digest] for digest in wanted if digest in pending and digest not in appended}
        known |= self._catalog.places(wanted)
        places = known | appended
        missing: dict[str, int] = {}
        for i, (digest, checksum) in enumerate(zip(batch.digests, batch.checksums, strict=True)):
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

    def _damaged(self, rows: list[Row], digests: list[str]) -> Set[str]:
        """Return the digests of rows that are known and in quarantine: these get bytes of their own."""
        held = self._catalog.in_quarantine(digests)
        if not held:
            return frozenset()
        return {digest for row, digest in zip(rows, digests, strict=True) if (row.policy, digest) in held}

    def _add_layout(self, form: Form) -> None:
        digest = form.layout.digest
        if digest not in self._layouts:
            self._catalog.add_layout(digest, form.layout.to_json())
            self._layouts.add(digest)

    # In the thread of the rows

    def _commit(self, given: "Future[_Placed]") -> list[Registered]:
        placed = given.result()
        rows, digests, refused = placed.rows, placed.digests, list[Registered]()
        try:
            for _ in range(ATTEMPTS):
                batch = self._revisions(placed, rows, digests)
                try:
                    new = self._catalog.add_batch(batch, placed.known.keys() - placed.appended.keys())
                except Moved:
                    placed = self._bytes.submit(self._append, placed).result()
                    continue
                except Purged as error:
                    # While this run was under way; the others are none the worse for it.
                    kept = [row.policy not in error.policies for row in rows]
                    refused += [_purged(row) for row, keep in zip(rows, kept, strict=True) if not keep]
                    rows, digests = list(compress(rows, kept)), list(compress(digests, kept))
                    continue
                self._heal(batch, new, placed.appended.keys() - placed.known.keys())
                positions = [row.position for row in rows]
                return refused + list(map(Registered, positions, batch.policies, digests, new))
        finally:
            for digest in placed.appended:
                self._pending.pop(digest, None)
        raise Conflict(
            f"Bytes that {len(placed.rows)} revisions share were moved away {ATTEMPTS} times. Register them "
            "again when `graftwork store compact` has ended."
        )

    def _heal(self, batch: RevisionBatch, new: list[bool], own: Set[str]) -> None:
        """Let known rows, of which no whole bytes were known, name those that were just appended."""
        if all(new):
            return
        keys = list(zip(batch.policies, batch.digests, strict=True))
        done = set(compress(keys, new))
        for i, key in enumerate(keys):
            if key[1] in own and key not in done:
                self._catalog.move_revision(batch.row(i))
                done.add(key)

    def _revisions(self, placed: _Placed, rows: list[Row], digests: list[str]) -> RevisionBatch:
        places = placed.known | placed.appended
        at = [places[digest] for digest in digests]
        form = placed.form
        return RevisionBatch(
            base=self._base_digest,
            rank=form.rank,
            bytes=form.nbytes,
            layout=form.layout.digest,
            length=form.layout.nbytes,
            owner=self._owner,
            created_at=self._now,
            policies=[row.policy for row in rows],
            digests=digests,
            parents=[row.parent for row in rows],
            steps=[row.step for row in rows],
            segments=[one.segment for one in at],
            offsets=[one.offset for one in at],
            checksums=[one.checksum for one in at],
        )


def _purged(row: Row) -> Registered:
    return refusal(row, f"Policy {row.policy!r} was purged. Create it again to register it.")
