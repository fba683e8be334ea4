"""Batches of a bulk registration into store and catalog: a thread names them, one takes bytes, one rows.

While the catalog takes the rows of a batch, the disk takes the bytes of the next, and the one after it is
packed and hashed. Bytes are fsynced before the rows that name them are committed, in the order of batches.
"""

from collections.abc import Collection, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.adapters.batches import Batch, Form, batch_of
from engine.adapters.bulk_entries import Registered, Row, refusal
from engine.adapters.catalog_schema import Revision
from engine.adapters.publishing import ATTEMPTS, exported
from engine.errors import Conflict, Moved, Purged

if TYPE_CHECKING:
    from torch import Tensor

    from engine.adapters.catalog import Catalog
    from engine.adapters.store import Location, Store

Pairs = list[tuple[Row, str]]
Places = dict[str, "Location"]


@dataclass(frozen=True)
class _Placed:
    """A batch whose bytes are in the store: each row with its digest, and where the digests' bytes lie.

    `known` were there before, `appended` are this batch's own. `damaged` digests share no bytes. `batch`
    is kept while known bytes may still move: None when there are none.
    """

    form: Form
    batch: Batch | None
    pairs: Pairs
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
        pairs = list(zip(rows, batch.digests, strict=True))
        return self._append(_Placed(batch.form, batch, pairs, self._damaged(pairs), {}, {}))

    def _append(self, placed: _Placed) -> _Placed:
        """Look up where each digest's bytes lie, and append those that the store does not have."""
        batch, appended = placed.batch, dict(placed.appended)
        if batch is None:
            return placed
        wanted = [digest for digest in batch.digests if digest not in placed.damaged]
        # In this order: what is pending no longer is in the catalog.
        pending = self._pending.copy()
        others = [digest for digest in wanted if digest in pending and digest not in appended]
        known = {digest: pending[digest] for digest in others}
        known |= self._catalog.places(wanted)
        missing: dict[str, int] = {}
        for i, (digest, checksum) in enumerate(zip(batch.digests, batch.checksums, strict=True)):
            at = appended.get(digest) or known.get(digest)
            # Bytes of another packing are other bytes: this batch's layout does not describe them.
            if at is None or (at.checksum, at.length) != (checksum, batch.form.layout.nbytes):
                missing[digest] = i
        if missing:
            payloads = batch.payloads()
            numbers = missing.values()
            places = self._store.append_many(
                [payloads[i] for i in numbers], [batch.checksums[i] for i in numbers], cached=False
            )
            appended.update(zip(missing, places, strict=True))
        self._pending.update(appended)
        return replace(placed, batch=batch if known else None, known=known, appended=appended)

    def _damaged(self, pairs: Pairs) -> set[str]:
        """Return the digests of rows that are known and in quarantine: these get bytes of their own."""
        held = self._catalog.in_quarantine([digest for _, digest in pairs])
        return {digest for row, digest in pairs if (row.policy, digest) in held} if held else set()

    def _add_layout(self, form: Form) -> None:
        digest = form.layout.digest
        if digest not in self._layouts:
            self._catalog.add_layout(digest, form.layout.to_json())
            self._layouts.add(digest)

    # In the thread of the rows

    def _commit(self, given: "Future[_Placed]") -> list[Registered]:
        placed = given.result()
        pairs, refused = placed.pairs, list[Registered]()
        try:
            for _ in range(ATTEMPTS):
                places = placed.known | placed.appended
                revisions = [
                    self._revision(row, digest, placed.form, places[digest]) for row, digest in pairs
                ]
                try:
                    new = self._catalog.add_revisions(revisions, places.keys() - placed.appended.keys())
                except Moved:
                    placed = self._bytes.submit(self._append, placed).result()
                    continue
                except Purged as error:
                    # While this run was under way; the others are none the worse for it.
                    refused += _purged(pairs, error.policies)
                    pairs = [pair for pair in pairs if pair[0].policy not in error.policies]
                    continue
                self._heal(revisions, new, placed.appended.keys() - placed.known.keys())
                return refused + [
                    Registered(row.position, row.policy, digest, is_new)
                    for (row, digest), is_new in zip(pairs, new, strict=True)
                ]
        finally:
            for digest in placed.appended:
                self._pending.pop(digest, None)
        raise Conflict(
            f"Bytes that {len(placed.pairs)} revisions share were moved away {ATTEMPTS} times. Register them "
            "again when `graftwork store compact` has ended."
        )

    def _heal(self, revisions: list[Revision], new: list[bool], own: Set[str]) -> None:
        """Let known rows, of which no whole bytes were known, name those that were just appended."""
        done = {(row.policy, row.digest) for row, is_new in zip(revisions, new, strict=True) if is_new}
        for row in revisions:
            key = row.policy, row.digest
            if row.digest in own and key not in done:
                self._catalog.move_revision(row)
                done.add(key)

    def _revision(self, row: Row, digest: str, form: Form, at: "Location") -> Revision:
        return exported(
            at,
            policy=row.policy,
            digest=digest,
            base=self._base_digest,
            parent=row.parent,
            step=row.step,
            rank=form.rank,
            bytes=form.nbytes,
            layout=form.layout.digest,
            owner=self._owner,
            created_at=self._now,
        )


def _purged(pairs: Pairs, policies: Collection[str]) -> list[Registered]:
    return [
        refusal(row, f"Policy {row.policy!r} was purged. Create it again to register it.")
        for row, _ in pairs
        if row.policy in policies
    ]
