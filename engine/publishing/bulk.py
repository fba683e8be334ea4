"""Registration in bulk: some ten thousand adapters a second from one process into catalog and store.

Adapters are collected by shape into batches, hashed and packed. A thread stores and commits one while the
next is collected. Bytes are fsynced before the rows that name them are committed, so that a kill at any
moment leaves whole revisions or none.
"""

import re
from collections.abc import Container, Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.adapters.revision import is_finite
from engine.catalog.policy_rows import taken
from engine.catalog.records import Revision
from engine.errors import AdapterError, Conflict, Moved, Purged
from engine.publishing.adapter_batches import BatchForm, flatten, form_of
from engine.publishing.ownership import claim
from engine.publishing.publish import ATTEMPTS
from engine.settings.params import POLICY_NAME
from engine.store.segments import checksum_of

if TYPE_CHECKING:
    from engine.adapters.revision import Tensors
    from engine.base.families import BaseShapes
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Location, Store

# The most adapters of a batch, and its bytes: enough to share the wait for an fsync, and for many of its
# random digests to fall on one page of the catalog's index; few enough for the thread to begin early.
BATCH, BATCH_BYTES = 4096, 32 << 20
# Bytes that may wait for more of their shape, all shapes together.
HELD_BYTES = 2 * BATCH_BYTES
# Shapes that are remembered: an endless iterator may bring ever new ones.
FORMS = 256
# A run of more adapters leaves a long log in SQLite.
MANY = 20_000
DIGEST = re.compile(r"[0-9a-f]{64}")
SHAPE, DTYPE = attrgetter("shape"), attrgetter("dtype")
Places = dict[str, "Location"]


class Entry(NamedTuple):
    """An adapter to register: canonical tensors in serving dtype, alpha equal to rank."""

    policy: str
    tensors: "Tensors"
    parent: str | None = None
    step: int = 0


class Registered(NamedTuple):
    """The result for the entry at `position` of the iterator: its digest, or why it was `refused`.

    A revision that the policy already had is not `new`.
    """

    position: int
    policy: str
    digest: str | None
    new: bool
    refused: str | None = None


class BulkRow(NamedTuple):
    """An entry whose names and shapes are right."""

    position: int
    policy: str
    parent: str | None
    step: int

    def refused(self, reason: str) -> Registered:
        """Return the result of an entry that is refused."""
        return Registered(self.position, self.policy, None, False, reason)


@dataclass
class Group:
    """Entries of one shape that wait to become a batch: their rows, and a copy of each one's values (D)."""

    form: BatchForm
    rows: list[BulkRow] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values."""
        return len(self.rows) * self.form.nbytes

    @property
    def is_full(self) -> bool:
        """Return whether this is a whole batch."""
        return len(self.rows) >= BATCH or self.nbytes >= BATCH_BYTES


@dataclass(frozen=True)
class BulkBatch:
    """Adapters of one shape, each with its digest; `payloads` are packed bytes and checksum, by digest."""

    form: BatchForm
    rows: list[BulkRow]
    digests: list[str]
    payloads: dict[str, tuple[memoryview, str]]

    def without(self, policies: Container[str]) -> "BulkBatch":
        """Return the batch without the rows of these policies."""
        kept = [row.policy not in policies for row in self.rows]
        return replace(self, rows=list(compress(self.rows, kept)), digests=list(compress(self.digests, kept)))


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
    """Register adapters of `base` at `now` (epoch seconds); yield each one's result once it is committed.

    Policies must be in the catalog and belong to `owner`. An unfit entry is refused by name and the others go
    on; results come a batch at a time, those of one shape in order. Raises `ServiceError` when store or
    catalog cannot be written: what was yielded is safe, a batch after it may be committed, too, and the same
    entries may be given again.
    """
    claim(catalog, store)
    admission = Admission(base, base_digest, dtype)
    registration = Registration(catalog, store, base_digest, owner, now)
    groups: dict[BatchForm, Group] = {}
    held = position = 0
    # The thread ends with what was handed over, also when the caller stops.
    with ExitStack() as end, ThreadPoolExecutor(1, "register") as thread:

        @end.callback
        def shorten() -> None:
            if position >= MANY:
                catalog.shorten_log()

        under_way: Future[list[Registered]] = thread.submit(list)

        def hand_over(group: Group) -> Iterator[Registered]:
            nonlocal under_way
            batch, refused = batch_of(group)
            before, under_way = under_way, thread.submit(registration.register, batch)
            yield from refused
            yield from before.result()

        for position, entry in enumerate(entries):
            try:
                form, values_D = admission.admit(entry)
            except AdapterError as error:
                yield Registered(position, entry.policy, None, False, str(error))
                continue
            group = groups.setdefault(form, Group(form))
            group.rows.append(BulkRow(position, entry.policy, entry.parent, entry.step))
            group.values.append(values_D)
            held += form.nbytes
            if group.is_full or held >= HELD_BYTES:
                largest = group if group.is_full else max(groups.values(), key=attrgetter("nbytes"))
                held -= largest.nbytes
                yield from hand_over(groups.pop(largest.form))
        for group in groups.values():
            yield from hand_over(group)
        yield from under_way.result()


# Here and not in the thread: `hashlib` gives the GIL away for each adapter, and a thread beside a busy one
# waits 5 ms to have it back.
def batch_of(group: Group) -> tuple[BulkBatch, list[Registered]]:
    """Return a group's adapters, hashed and packed, and the refusals of those with NaN or Inf."""
    form, rows, values_ND = group.form, group.rows, torch.stack(group.values)
    refused = []
    if not is_finite(values_ND):
        finite_N = values_ND.isfinite().all(dim=1)
        unfit = [(rows[n], group.values[n]) for n in (~finite_N).nonzero().flatten().tolist()]
        refused = [row.refused(form.first_fault(values_D)) for row, values_D in unfit]
        rows, values_ND = list(compress(rows, finite_N.tolist())), values_ND[finite_N]
    # Nothing holds a copy of them beside the packed bytes.
    group.values.clear()
    digests, payloads = form.digests(values_ND), form.pack(values_ND)
    sums = zip(payloads, map(checksum_of, payloads), strict=True)
    # Neighbouring keys share a page of the catalog's index.
    order = sorted(range(len(rows)), key=digests.__getitem__)
    rows, ordered = [rows[n] for n in order], [digests[n] for n in order]
    return BulkBatch(form, rows, ordered, dict(zip(digests, sums, strict=True))), refused


class Admission:
    """Decides which entries can be registered, by everything but their values and their policies."""

    def __init__(self, base: "BaseShapes", base_digest: str, dtype: torch.dtype):
        self._base, self._base_digest, self._dtype = base, base_digest, dtype
        self._modules = base.modules()
        # By names, shapes and dtypes: the form, or why there is none.
        self._forms: dict[object, BatchForm | str] = {}

    def admit(self, entry: Entry) -> tuple[BatchForm, Tensor]:
        """Return an entry's form and a copy of its values (D). Raises `AdapterError` when it is unfit."""
        policy, given, parent, step = entry
        if parent is not None and not (isinstance(parent, str) and DIGEST.fullmatch(parent)):
            raise AdapterError(f"The parent {str(parent)[:80]!r} is not a digest of 64 hex digits.")
        if type(step) is not int or not 0 <= step < 1 << 31:
            raise AdapterError(f"The step {str(step)[:80]} is not a step number, a whole number from 0.")
        if not isinstance(policy, str) or not POLICY_NAME.fullmatch(policy):
            raise AdapterError(f"{str(policy)[:80]!r} is not a policy name.")
        try:
            names = tuple(sorted(given))
            tensors = [given[name] for name in names]
            shapes = names, tuple(map(SHAPE, tensors)), tuple(map(DTYPE, tensors))
        except (TypeError, AttributeError):
            raise AdapterError("The entry's tensors must be a dict of tensors by their names.") from None
        form = self._forms.get(shapes) or self._form(shapes, given)
        if isinstance(form, str):
            raise AdapterError(form)
        return form, flatten(tensors)

    def _form(self, shapes: object, tensors: "Tensors") -> BatchForm | str:
        if len(self._forms) >= FORMS:
            self._forms.clear()
        try:
            form: BatchForm | str = form_of(
                tensors, self._base, self._modules, self._base_digest, self._dtype
            )
        except AdapterError as error:
            form = str(error)
        self._forms[shapes] = form
        return form


class Registration:
    """Stores and commits batches, one after another."""

    def __init__(self, catalog: "Catalog", store: "Store", base_digest: str, owner: str, now: float):
        self._catalog, self._store = catalog, store
        self._base_digest, self._owner, self._now = base_digest, owner, now

    def register(self, batch: BulkBatch) -> list[Registered]:
        """Return the result of each row."""
        faults = self._faults({row.policy for row in batch.rows})
        refused = [row.refused(faults[row.policy]) for row in batch.rows if row.policy in faults]
        try:
            return sorted(refused + self._commit(batch.without(faults)))
        finally:
            self._store.committed()

    def _faults(self, policies: Set[str]) -> dict[str, str]:
        """Return why entries of these policies are refused, by policy; those in order are left out."""
        owners = self._catalog.policies.owners(sorted(policies))
        mine = self._owner, self._base_digest
        faults = {name: taken(name, known, mine) for name, known in owners.items()}
        for name in policies - owners.keys():
            unknown = f"There is no policy {name!r} in the catalog. Add it first."
            faults[name] = purged(name) if self._catalog.purges.find(name) else unknown
        return {name: fault for name, fault in faults.items() if fault}

    def _commit(self, batch: BulkBatch) -> list[Registered]:
        if not batch.rows:
            return []
        self._catalog.layouts.add(batch.form.layout.digest, batch.form.layout.to_json())
        held = self._catalog.quarantine.among(batch.digests)
        # Rows in quarantine get bytes of their own.
        damaged = {
            digest
            for row, digest in zip(batch.rows, batch.digests, strict=True)
            if (row.policy, digest) in held
        }
        own: Places = {}
        refused: list[Registered] = []
        for _ in range(ATTEMPTS):
            known = self._whole(self._catalog.places.find(sorted({*batch.digests} - damaged)))
            own |= self._append(batch, known | own)
            rows = self._rows(batch, known | own)
            try:
                new = self._catalog.revisions.add_many(rows, known.keys() - own.keys())
            except Moved:
                continue
            except Purged as error:
                # Purged during this run; the other policies go on.
                gone = [row for row in batch.rows if row.policy in error.policies]
                refused += [row.refused(purged(row.policy)) for row in gone]
                batch = batch.without(error.policies)
                if not batch.rows:
                    return refused
                continue
            fresh = own.keys() - known.keys()
            # Known rows without whole bytes have those that were just appended; a twin's row has them.
            added = {(row.policy, row.digest) for row in compress(rows, new)}
            stale = [row for row in rows if row.digest in fresh and (row.policy, row.digest) not in added]
            self._catalog.places.replace_many(stale)
            results = zip(batch.rows, batch.digests, new, strict=True)
            return refused + [
                Registered(row.position, row.policy, one, is_new) for row, one, is_new in results
            ]
        raise Conflict(
            f"The bytes that {len(batch.rows)} revisions share moved {ATTEMPTS} times. Register them again "
            "when `graftwork store compact` has ended."
        )

    def _append(self, batch: BulkBatch, places: Places) -> Places:
        """Append the bytes of digests without a place, or whose place has bytes of another packing."""
        missing = {
            digest: batch.payloads[digest]
            for digest in batch.digests
            if (at := places.get(digest)) is None
            or (at.checksum, at.length) != (batch.payloads[digest][1], batch.form.layout.nbytes)
        }
        payloads, checksums = [one for one, _ in missing.values()], [one for _, one in missing.values()]
        return dict(zip(missing, self._store.append_many(payloads, checksums, cached=False), strict=True))

    def _whole(self, places: Places) -> Places:
        """Return the places whose bytes are whole: a row may name bytes that the disk has lost since."""
        if not places:
            return places
        faults = self._store.check(list(places.values()))
        return {digest: at for (digest, at), fault in zip(places.items(), faults, strict=True) if not fault}

    def _rows(self, batch: BulkBatch, places: Places) -> list[Revision]:
        form = batch.form
        return [
            Revision(
                policy=row.policy,
                digest=digest,
                base=self._base_digest,
                parent=row.parent,
                step=row.step,
                rank=form.rank,
                bytes=form.nbytes,
                layout=form.layout.digest,
                segment=places[digest].segment,
                offset=places[digest].offset,
                length=form.layout.nbytes,
                checksum=places[digest].checksum,
                state="exported",
                owner=self._owner,
                created_at=self._now,
            )
            for row, digest in zip(batch.rows, batch.digests, strict=True)
        ]


def purged(policy: str) -> str:
    """Return the reason for refusing an entry of a purged policy."""
    return f"Policy {policy!r} was purged. Create it again to register it."
