"""Registration in bulk: some ten thousand adapters a second from one process into catalog and store.

Adapters are collected into batches, and those of one shape hashed and packed together. A thread stores and
commits one batch while the next is collected. Bytes are fsynced before the rows that name them are committed,
so that a kill at any moment leaves whole revisions or none.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.adapters.revision import is_finite
from engine.catalog.places import Layout
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
# Returns the form of adapters with these names, shapes and dtypes, or why there is none.
Form = Callable[[tuple[str, ...], tuple[torch.Size, ...], tuple[torch.dtype, ...]], BatchForm | str]


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
    digest: str | None = None
    new: bool = False
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


# Entries of one shape: each one's position, itself, and a copy of its values (D).
Group = list[tuple[int, Entry, Tensor]]
Batch = tuple[list[BulkRow], list[Registered]]


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

    # A refusal is kept, too: to check an unfit adapter takes longer than to register a fit one.
    @lru_cache(FORMS)
    def form(
        names: tuple[str, ...], shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]
    ) -> BatchForm | str:
        try:
            return form_of(names, shapes, dtypes, base, base_digest, dtype)
        except AdapterError as error:
            return str(error)

    registration = Registration(catalog, store, base_digest, owner, now)
    count = 0
    try:
        # The thread ends with what was handed over, also when the caller stops.
        with ThreadPoolExecutor(1, "register") as thread:
            under_way: Future[list[Registered]] = thread.submit(list)
            for rows, refused in batches(entries, form):
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
def batches(entries: Iterable[Entry], form_of_shapes: Form) -> Iterator[Batch]:
    """Yield the entries a batch at a time: those that are fit, in the order of digests, and refusals."""
    groups = defaultdict[BatchForm, Group](list)
    refused: list[Registered] = []
    count = size = 0
    for position, entry in enumerate(entries):
        count += 1
        try:
            form, values_D = admitted(entry, form_of_shapes)
            groups[form].append((position, entry, values_D))
            size += form.nbytes
        except AdapterError as error:
            refused.append(Registered(position, entry.policy, refused=str(error)))
        if count >= BATCH or size >= BATCH_BYTES:
            yield packed(groups, refused)
            refused, count, size = [], 0, 0
    yield packed(groups, refused)


def admitted(entry: Entry, form_of_shapes: Form) -> tuple[BatchForm, Tensor]:
    """Return an entry's form and a copy of its values (D).

    Raises `AdapterError` when it is unfit by anything but its values and its policy's row.
    """
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
        shapes, dtypes = tuple(map(SHAPE, tensors)), tuple(map(DTYPE, tensors))
    except (TypeError, AttributeError):
        raise AdapterError("The entry's tensors must be a dict of tensors by their names.") from None
    form = form_of_shapes(names, shapes, dtypes)
    if isinstance(form, str):
        raise AdapterError(form)
    return form, flatten(tensors)


def packed(groups: dict[BatchForm, Group], refused: list[Registered]) -> Batch:
    """Return the rows of all groups, which it empties, and the refusals with those of NaN and Inf."""
    rows = []
    while groups:
        form, group = groups.popitem()
        values_ND = torch.stack([values_D for *_, values_D in group])
        if not is_finite(values_ND):
            finite_N = values_ND.isfinite().all(dim=1)
            refused += [
                Registered(position, entry.policy, refused=form.first_fault(values_D))
                for position, entry, values_D in compress(group, (~finite_N).tolist())
            ]
            group, values_ND = list(compress(group, finite_N.tolist())), values_ND[finite_N]
        rows += [
            BulkRow(position, policy, parent, step, form, digest, payload, checksum_of(payload))
            for (position, (policy, _, parent, step), _), digest, payload in zip(
                group, form.digests(values_ND), form.pack(values_ND), strict=True
            )
        ]
    # Neighbouring keys share a page of the catalog's index.
    return sorted(rows, key=attrgetter("digest")), refused


class Registration:
    """Stores and commits batches, one after another."""

    def __init__(self, catalog: "Catalog", store: "Store", base_digest: str, owner: str, now: float):
        self._catalog, self._store = catalog, store
        self._base_digest, self._owner, self._now = base_digest, owner, now

    def register(self, rows: list[BulkRow]) -> list[Registered]:
        """Return the result of each row."""
        appended: Places = {}
        results: list[Registered] = []
        try:
            for _ in range(ATTEMPTS):
                faults = self._faults({row.policy for row in rows})
                results += [
                    Registered(row.position, row.policy, refused=faults[row.policy])
                    for row in rows
                    if row.policy in faults
                ]
                rows = [row for row in rows if row.policy not in faults]
                # Shared bytes have moved, or a policy was purged: both are looked up again.
                with suppress(Moved, Purged):
                    return sorted(results + self._commit(rows, appended))
        finally:
            self._store.committed()
        raise Conflict(
            f"The bytes that {len(rows)} revisions share moved {ATTEMPTS} times. Register them again "
            "when `graftwork store compact` has ended."
        )

    def _faults(self, policies: Set[str]) -> dict[str, str]:
        """Return why entries of these policies are refused, by policy; those in order are left out."""
        owners = self._catalog.policies.owners(sorted(policies))
        mine = self._owner, self._base_digest
        faults = {name: taken(name, known, mine) for name, known in owners.items()}
        unknown = policies - owners.keys()
        purged = self._catalog.purges.gone(unknown)
        for name in unknown:
            faults[name] = (
                f"Policy {name!r} was purged. Create it again to register it."
                if name in purged
                else f"There is no policy {name!r} in the catalog. Add it first."
            )
        return {name: fault for name, fault in faults.items() if fault}

    def _commit(self, rows: list[BulkRow], appended: Places) -> list[Registered]:
        """Commit rows whose policies are in order; the bytes that it appends are `appended` from then on."""
        held = self._catalog.quarantine.among([row.digest for row in rows])
        # Rows in quarantine get bytes of their own.
        damaged = {row.digest for row in rows if (row.policy, row.digest) in held}
        known = self._whole(self._catalog.places.find(sorted({row.digest for row in rows} - damaged)))
        self._append(rows, known, appended)
        places = known | appended
        revisions = [self._revision(row, places[row.digest]) for row in rows]
        layouts = {row.form.layout.digest: row.form.layout for row in rows}
        bodies = [Layout(digest, layout.to_json()) for digest, layout in layouts.items()]
        is_new = self._catalog.revisions.add_many(revisions, known.keys() - appended.keys(), bodies)
        # Known rows without whole bytes have those that were just appended; a twin's row has them.
        fresh = appended.keys() - known.keys()
        added = {(row.policy, row.digest) for row in compress(rows, is_new)}
        self._catalog.places.replace_many(
            [row for row in revisions if row.digest in fresh and (row.policy, row.digest) not in added]
        )
        return [
            Registered(row.position, row.policy, row.digest, new)
            for row, new in zip(rows, is_new, strict=True)
        ]

    def _whole(self, places: Places) -> Places:
        """Return the places whose bytes are whole: a row may name bytes that the disk has lost since."""
        faults = self._store.check(list(places.values())) if places else []
        return {digest: at for (digest, at), fault in zip(places.items(), faults, strict=True) if not fault}

    def _append(self, rows: list[BulkRow], known: Places, appended: Places) -> None:
        """Append the bytes of digests without a place, or whose place has bytes of another packing."""
        missing = {
            row.digest: row
            for row in rows
            if (at := appended.get(row.digest) or known.get(row.digest)) is None
            or (at.checksum, at.length) != (row.checksum, row.form.layout.nbytes)
        }
        payloads = [row.payload for row in missing.values()]
        checksums = [row.checksum for row in missing.values()]
        appended.update(zip(missing, self._store.append_many(payloads, checksums, cached=False), strict=True))

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
