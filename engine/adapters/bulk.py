"""Registration in bulk: tens of thousands of adapters a second from one process into catalog and store.

Adapters are collected by shape into batches; a batch is checked, named and packed while the one before it
is written. Bytes are appended and fsynced before the rows that name them are committed, so that a kill at
any moment leaves whole revisions or none. Knows what makes an entry unfit; `batches.py` knows the tensors.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.adapters.batches import Batch, Form, batch_of, finite_rows, first_fault, stack
from engine.adapters.bulk_entries import Entry, Gate
from engine.adapters.catalog_schema import Revision
from engine.errors import AdapterError, Conflict, Moved

if TYPE_CHECKING:
    from engine.adapters.catalog import Catalog
    from engine.adapters.families import BaseShapes
    from engine.adapters.store import Location, Store

__all__ = ["Entry", "Registered", "register_many"]

# A batch: few enough adapters for a short transaction, enough to share the wait for two fsyncs.
BATCH = 8192
BATCH_BYTES = 64 << 20
# What may wait for more of its shape, all shapes together.
HELD_BYTES = 2 * BATCH_BYTES
# How often bytes that were known may be moved away before a batch is written.
ATTEMPTS = 5


class Registered(NamedTuple):
    """What became of the entry at `position` of the iterator: its digest, or why it was `refused`.

    A revision that the policy had already is not `new`.
    """

    position: int
    policy: str
    digest: str | None
    new: bool
    refused: str | None = None


class _Row(NamedTuple):
    position: int
    policy: str
    parent: str | None
    step: int


@dataclass
class _Group:
    """Entries of one form that wait for more of them; `tensors` in the order of the form's keys."""

    form: Form
    rows: list[_Row] = field(default_factory=list)
    tensors: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return len(self.rows) * self.form.nbytes

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= BATCH or self.nbytes >= BATCH_BYTES


def register_many(
    catalog: "Catalog",
    store: "Store",
    base: "BaseShapes",
    base_digest: str,
    entries: Iterable[Entry],
    owner: str,
    now: float,
    dtype: torch.dtype,
) -> Iterator[Registered]:
    """Register adapters of `base` at `now` (epoch seconds) and yield what became of each, once committed.

    Policies must be in the catalog and `owner`'s. An entry that does not fit is refused by name and the
    others go on; results come batch by batch, those of one shape in order. Raises `ServiceError` when store
    or catalog cannot be written: what was yielded is safe, and the same entries may be given again.
    """
    gate = Gate(catalog, base, base_digest, owner, dtype)
    groups: dict[Form, _Group] = {}
    held = 0
    with _Pipeline(_Writer(catalog, store, base_digest, owner, now)) as pipeline:
        for position, entry in enumerate(entries):
            try:
                form, tensors = gate.admit(entry)
            except AdapterError as error:
                yield Registered(position, entry.policy, None, False, str(error))
                continue
            group = groups.get(form)
            if group is None:
                group = groups[form] = _Group(form)
            group.rows.append(_Row(position, entry.policy, entry.parent, entry.step))
            group.tensors.append(tensors)
            held += form.nbytes
            if group.is_full or held >= HELD_BYTES:
                fullest = group if group.is_full else max(groups.values(), key=lambda group: group.nbytes)
                held -= fullest.nbytes
                yield from pipeline.put(groups.pop(fullest.form))
        while groups:
            yield from pipeline.put(groups.popitem()[1])
        yield from pipeline.drain()


class _Pipeline:
    """Checks and packs one batch in this thread while another thread writes the one before it."""

    def __init__(self, writer: "_Writer"):
        self._writer = writer
        self._helper = ThreadPoolExecutor(1, "register-hash")
        self._thread = ThreadPoolExecutor(1, "register-write")
        self._behind: deque[Future[list[Registered]]] = deque()

    def __enter__(self) -> "_Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        # What was handed over is written to its end, also when the caller has lost interest.
        self._thread.shutdown()
        self._helper.shutdown()

    def put(self, group: _Group) -> Iterator[Registered]:
        """Hand a group over, and yield its refused entries and what has been committed meanwhile."""
        rows, values_ND, refused = _fit(group)
        yield from refused
        if rows:
            batch = batch_of(group.form, values_ND, self._helper)
            self._behind.append(self._thread.submit(self._writer.write, batch, rows))
        while len(self._behind) > 1:
            yield from self._behind.popleft().result()

    def drain(self) -> Iterator[Registered]:
        while self._behind:
            yield from self._behind.popleft().result()


def _fit(group: _Group) -> tuple[list[_Row], Tensor, list[Registered]]:
    """Return the rows whose values can be served, these values, and the refused."""
    form, rows = group.form, group.rows
    refused: list[Registered] = []
    try:
        values_ND = stack(form, group.tensors)
    except RuntimeError:
        # Sparse ones, or some on another device: torch says so of a whole batch.
        rows, values_ND, refused = _stack_each(group)
    finite_N = finite_rows(values_ND)
    if not finite_N.all():
        for row, values_D, finite in zip(rows, values_ND, finite_N.tolist(), strict=True):
            if not finite:
                refused.append(_refusal(row, first_fault(form, values_D)))
        rows = [row for row, finite in zip(rows, finite_N.tolist(), strict=True) if finite]
        values_ND = values_ND[finite_N]
    return rows, values_ND, refused


def _stack_each(group: _Group) -> tuple[list[_Row], Tensor, list[Registered]]:
    rows, values, refused = [], [], []
    for row, tensors in zip(group.rows, group.tensors, strict=True):
        try:
            values.append(stack(group.form, [tensors]))
            rows.append(row)
        except RuntimeError as error:
            refused.append(
                _refusal(row, f"The adapter's values cannot be read: {str(error).splitlines()[0]}")
            )
    return rows, torch.cat(values) if values else torch.empty(0, 1), refused


def _refusal(row: _Row, reason: str) -> Registered:
    return Registered(row.position, row.policy, None, False, reason)


class _Writer:
    """Commits batches: looks up what is known, appends and fsyncs the other bytes, then adds the rows.

    The store must hold no other bytes that wait for their rows.
    """

    def __init__(self, catalog: "Catalog", store: "Store", base_digest: str, owner: str, now: float):
        self._catalog, self._store = catalog, store
        self._base_digest, self._owner, self._now = base_digest, owner, now
        self._layouts: set[str] = set()

    def write(self, batch: Batch, rows: list[_Row]) -> list[Registered]:
        self._add_layout(batch.form)
        appended: dict[str, Location] = {}
        damaged = self._damaged(batch, rows)
        for _ in range(ATTEMPTS):
            known = self._catalog.places([digest for digest in batch.digests if digest not in damaged])
            places = self._places(batch, known, appended)
            revisions = [
                self._revision(row, digest, batch.form, places[digest])
                for row, digest in zip(rows, batch.digests, strict=True)
            ]
            try:
                new = self._catalog.add_revisions(revisions, places.keys() - appended.keys())
            except Moved:
                continue
            self._heal(revisions, new, appended.keys() - known.keys())
            self._store.committed()
            return [
                Registered(row.position, row.policy, digest, is_new)
                for row, digest, is_new in zip(rows, batch.digests, new, strict=True)
            ]
        raise Conflict(
            f"Bytes that {len(rows)} revisions share were moved away {ATTEMPTS} times. Register them again "
            "when `graftwork store compact` has ended."
        )

    def _damaged(self, batch: Batch, rows: list[_Row]) -> set[str]:
        """Return the digests of rows that are known and in quarantine: these get bytes of their own."""
        held = self._catalog.in_quarantine(batch.digests)
        return {
            digest
            for row, digest in zip(rows, batch.digests, strict=True)
            if held and (row.policy, digest) in held
        }

    def _heal(self, revisions: list[Revision], new: list[bool], own: Set[str]) -> None:
        """Let known rows, of which no whole bytes were known, name those that were just appended."""
        done = {(row.policy, row.digest) for row, is_new in zip(revisions, new, strict=True) if is_new}
        for row in revisions:
            key = row.policy, row.digest
            if row.digest in own and key not in done:
                self._catalog.move_revision(row)
                done.add(key)

    def _places(
        self, batch: Batch, known: "dict[str, Location]", appended: "dict[str, Location]"
    ) -> "dict[str, Location]":
        """Return where the bytes of each digest lie, after appending those that the store does not have."""
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
                [payloads[i] for i in numbers], [batch.checksums[i] for i in numbers]
            )
            appended.update(zip(missing, places, strict=True))
        return known | appended

    def _add_layout(self, form: Form) -> None:
        digest = form.layout.digest
        if digest not in self._layouts:
            self._catalog.add_layout(digest, form.layout.to_json())
            self._layouts.add(digest)

    def _revision(self, row: _Row, digest: str, form: Form, at: "Location") -> Revision:
        return Revision(
            policy=row.policy,
            digest=digest,
            base=self._base_digest,
            parent=row.parent,
            step=row.step,
            rank=form.rank,
            bytes=form.nbytes,
            layout=form.layout.digest,
            segment=at.segment,
            offset=at.offset,
            length=at.length,
            checksum=at.checksum,
            state="exported",
            owner=self._owner,
            created_at=self._now,
        )
