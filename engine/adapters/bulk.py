"""Registration in bulk: tens of thousands of adapters a second from one process into catalog and store.

Adapters are collected by shape into batches; a batch is checked, named and packed while the one before it
is written. Bytes are appended and fsynced before the rows that name them are committed, so that a kill at
any moment leaves whole revisions or none. Knows what makes an entry unfit; `batches.py` knows the tensors.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.adapters.batches import Batch, Form, batch_of, finite_rows, first_fault, stack
from engine.adapters.bulk_entries import Entry, Gate
from engine.adapters.catalog_schema import Revision
from engine.adapters.publishing import ATTEMPTS, exported
from engine.errors import AdapterError, Conflict, Moved, Purged

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
VERSION = attrgetter("_version")


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
    versions: list[int] = field(default_factory=list)

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

    An entry's tensors are kept, not copied, until its batch is written: they must stay as they are. One
    whose tensors were changed meanwhile is refused where torch notices, which it does not when their
    memory is written to by something else.

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
            group.versions.append(_version(tensors))
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
    group, refused = _unchanged(group)
    form, rows = group.form, group.rows
    if not rows:
        return rows, torch.empty(0, 1), refused
    try:
        values_ND = stack(form, group.tensors)
    except RuntimeError:
        # Sparse ones, or some on another device: torch says so of a whole batch.
        rows, values_ND, unread = _stack_each(group)
        refused += unread
    finite_N = finite_rows(values_ND)
    if not finite_N.all():
        for row, values_D, finite in zip(rows, values_ND, finite_N.tolist(), strict=True):
            if not finite:
                refused.append(_refusal(row, first_fault(form, values_D)))
        rows = [row for row, finite in zip(rows, finite_N.tolist(), strict=True) if finite]
        values_ND = values_ND[finite_N]
    return rows, values_ND, refused


def _unchanged(group: _Group) -> tuple[_Group, list[Registered]]:
    """Return the group without the entries whose tensors were changed since they came, and the refused."""
    same = [
        version == _version(tensors) for version, tensors in zip(group.versions, group.tensors, strict=True)
    ]
    if all(same):
        return group, []
    reason = "The adapter's tensors were changed before they were registered. Give each entry its own."
    refused = [_refusal(row, reason) for row in compress(group.rows, (not one for one in same))]
    rows, tensors = list(compress(group.rows, same)), list(compress(group.tensors, same))
    return _Group(group.form, rows, tensors), refused


def _version(tensors: tuple[Tensor, ...]) -> int:
    """Return a number that grows when torch writes to one of the tensors; those of inference have none."""
    try:
        return sum(map(VERSION, tensors))
    except RuntimeError:
        return 0


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
        refused: list[Registered] = []
        pairs = list(zip(rows, batch.digests, strict=True))
        damaged = self._damaged(pairs)
        for _ in range(ATTEMPTS):
            known = self._catalog.places([digest for digest in batch.digests if digest not in damaged])
            places = self._places(batch, known, appended)
            revisions = [self._revision(row, digest, batch.form, places[digest]) for row, digest in pairs]
            try:
                new = self._catalog.add_revisions(revisions, places.keys() - appended.keys())
            except Moved:
                continue
            except Purged as error:
                # While this run was under way; the others are none the worse for it.
                refused += [
                    _refusal(row, f"Policy {row.policy!r} was purged. Create it again to register it.")
                    for row, _ in pairs
                    if row.policy in error.policies
                ]
                pairs = [pair for pair in pairs if pair[0].policy not in error.policies]
                continue
            self._heal(revisions, new, appended.keys() - known.keys())
            self._store.committed()
            return refused + [
                Registered(row.position, row.policy, digest, is_new)
                for (row, digest), is_new in zip(pairs, new, strict=True)
            ]
        raise Conflict(
            f"Bytes that {len(rows)} revisions share were moved away {ATTEMPTS} times. Register them again "
            "when `graftwork store compact` has ended."
        )

    def _damaged(self, pairs: list[tuple[_Row, str]]) -> set[str]:
        """Return the digests of rows that are known and in quarantine: these get bytes of their own."""
        held = self._catalog.in_quarantine([digest for _, digest in pairs])
        return {digest for row, digest in pairs if (row.policy, digest) in held} if held else set()

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
