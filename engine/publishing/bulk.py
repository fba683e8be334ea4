"""Registration in bulk: some ten thousand adapters a second from one process into catalog and store.

Adapters are collected into batches, and those of one shape hashed and packed together. A thread stores and
commits one batch while the next is collected. Bytes are fsynced before the rows that name them are committed,
so that a kill at any moment leaves whole revisions or none.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
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
    """An entry that is fit, with its digest, and its packed bytes with their checksum."""

    position: int
    policy: str
    parent: str | None
    step: int
    form: BatchForm
    digest: str
    payload: memoryview
    checksum: str

    def refused(self, reason: str) -> Registered:
        """Return the result of an entry that is refused."""
        return Registered(self.position, self.policy, None, False, reason)


# Entries of one shape: each one's position, itself, and a copy of its values (D).
Group = list[tuple[int, Entry, Tensor]]


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
    count = 0
    try:
        # The thread ends with what was handed over, also when the caller stops.
        with ThreadPoolExecutor(1, "register") as thread:
            under_way: Future[list[Registered]] = thread.submit(list)
            for rows, refused in batches(entries, admission):
                before, under_way = under_way, thread.submit(registration.register, rows)
                count += len(rows)
                yield from refused
                yield from before.result()
            yield from under_way.result()
    finally:
        if count > MANY:
            catalog.shorten_log()


# Here and not in the thread: `hashlib` gives the GIL away for each adapter, and a thread beside a busy one
# waits 5 ms to have it back.
def batches(
    entries: Iterable[Entry], admission: "Admission"
) -> Iterator[tuple[list[BulkRow], list[Registered]]]:
    """Yield the entries a batch at a time: those that are fit, in the order of digests, and refusals."""
    groups = defaultdict[BatchForm, Group](list)
    refused: list[Registered] = []
    count = size = 0
    for position, entry in enumerate(entries):
        count += 1
        try:
            form, values_D = admission.admit(entry)
            groups[form].append((position, entry, values_D))
            size += form.nbytes
        except AdapterError as error:
            refused.append(Registered(position, entry.policy, None, False, str(error)))
        if count >= BATCH or size >= BATCH_BYTES:
            yield packed(groups, refused)
            refused, count, size = [], 0, 0
    yield packed(groups, refused)


def packed(
    groups: dict[BatchForm, Group], refused: list[Registered]
) -> tuple[list[BulkRow], list[Registered]]:
    """Return the rows of all groups, which it empties, and the refusals with those of NaN and Inf."""
    rows = []
    while groups:
        form, group = groups.popitem()
        values_ND = torch.stack([values_D for _, _, values_D in group])
        if not is_finite(values_ND):
            finite_N = values_ND.isfinite().all(dim=1)
            unfit = [group[n] for n in (~finite_N).nonzero().flatten().tolist()]
            refused += [
                Registered(position, entry.policy, None, False, form.first_fault(values_D))
                for position, entry, values_D in unfit
            ]
            group, values_ND = list(compress(group, finite_N.tolist())), values_ND[finite_N]
        rows += [
            BulkRow(
                position, entry.policy, entry.parent, entry.step, form, digest, payload, checksum_of(payload)
            )
            for (position, entry, _), digest, payload in zip(
                group, form.digests(values_ND), form.pack(values_ND), strict=True
            )
        ]
    # Neighbouring keys share a page of the catalog's index.
    return sorted(rows, key=attrgetter("digest")), refused


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

    def register(self, rows: list[BulkRow]) -> list[Registered]:
        """Return the result of each row."""
        faults = self._faults({row.policy for row in rows})
        refused = [row.refused(faults[row.policy]) for row in rows if row.policy in faults]
        try:
            return sorted(refused + self._commit([row for row in rows if row.policy not in faults]))
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

    def _commit(self, rows: list[BulkRow]) -> list[Registered]:
        layouts = {row.form.layout.digest: row.form.layout for row in rows}
        for digest, layout in layouts.items():
            self._catalog.layouts.add(digest, layout.to_json())
        held = self._catalog.quarantine.among([row.digest for row in rows])
        # Rows in quarantine get bytes of their own.
        damaged = {row.digest for row in rows if (row.policy, row.digest) in held}
        own: Places = {}
        refused: list[Registered] = []
        for _ in range(ATTEMPTS):
            known = self._whole(self._catalog.places.find(sorted({row.digest for row in rows} - damaged)))
            own |= self._append(rows, known | own)
            places = known | own
            revisions = [self._revision(row, places[row.digest]) for row in rows]
            try:
                new = self._catalog.revisions.add_many(revisions, known.keys() - own.keys())
            except Moved:
                continue
            except Purged as error:
                # Purged during this run; the other policies go on.
                refused += [row.refused(purged(row.policy)) for row in rows if row.policy in error.policies]
                rows = [row for row in rows if row.policy not in error.policies]
                if not rows:
                    return refused
                continue
            fresh = own.keys() - known.keys()
            # Known rows without whole bytes have those that were just appended; a twin's row has them.
            added = {(row.policy, row.digest) for row in compress(rows, new)}
            self._catalog.places.replace_many(
                [row for row in revisions if row.digest in fresh and (row.policy, row.digest) not in added]
            )
            return refused + [
                Registered(row.position, row.policy, row.digest, is_new)
                for row, is_new in zip(rows, new, strict=True)
            ]
        raise Conflict(
            f"The bytes that {len(rows)} revisions share moved {ATTEMPTS} times. Register them again "
            "when `graftwork store compact` has ended."
        )

    def _append(self, rows: list[BulkRow], places: Places) -> Places:
        """Append the bytes of digests without a place, or whose place has bytes of another packing."""
        missing = {
            row.digest: row
            for row in rows
            if (at := places.get(row.digest)) is None
            or (at.checksum, at.length) != (row.checksum, row.form.layout.nbytes)
        }
        payloads = [row.payload for row in missing.values()]
        checksums = [row.checksum for row in missing.values()]
        return dict(zip(missing, self._store.append_many(payloads, checksums, cached=False), strict=True))

    def _whole(self, places: Places) -> Places:
        """Return the places whose bytes are whole: a row may name bytes that the disk has lost since."""
        if not places:
            return places
        faults = self._store.check(list(places.values()))
        return {digest: at for (digest, at), fault in zip(places.items(), faults, strict=True) if not fault}

    def _revision(self, row: BulkRow, at: "Location") -> Revision:
        return Revision(
            segment=at.segment,
            offset=at.offset,
            length=at.length,
            checksum=at.checksum,
            policy=row.policy,
            digest=row.digest,
            base=self._base_digest,
            parent=row.parent,
            step=row.step,
            rank=row.form.rank,
            bytes=row.form.nbytes,
            layout=row.form.layout.digest,
            state="exported",
            owner=self._owner,
            created_at=self._now,
        )


def purged(policy: str) -> str:
    """Return the reason for refusing an entry of a purged policy."""
    return f"Policy {policy!r} was purged. Create it again to register it."
