"""Registration in bulk: tens of thousands of adapters a second from one process into catalog and store.

Adapters are collected by shape into batches; a batch is checked, hashed and packed while the one before it is
written. Bytes are appended and fsynced before the rows that name them are committed, so that a kill at any
moment leaves whole revisions or none. `entries.py` decides which entries are refused and, by their values,
`groups.py`. The public interface is `__all__`.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from engine.errors import AdapterError
from engine.publishing.bulk.batches import BatchForm
from engine.publishing.bulk.entries import BulkAdmission, BulkRow, Entry, Registered
from engine.publishing.bulk.groups import BATCH_BYTES, Group
from engine.publishing.bulk.writer import PlacedBatch, Writer

if TYPE_CHECKING:
    import torch

    from engine.base.families import BaseShapes
    from engine.catalog.catalog import Catalog
    from engine.store.segments import Store

__all__ = ["Entry", "Registered", "register_many"]

# Bytes that may wait for more of their shape, all shapes together.
HELD_BYTES = 8 * BATCH_BYTES
# Batches on their way to the store: one being hashed, one being written.
BEHIND = 2
# Batches committed together: at least and, as a run gets longer, at most. Digests are random, so that each
# row changes a page of the index: among 16,000 rows many share one, and SQLite writes a fifth of what it
# writes for 2,000 at a time.
TOGETHER, MOST_TOGETHER = 8, 32
# The batches so far, divided by this, are committed together.
SHARE_TOGETHER = 2
# Batches after which all are waited for, so that gc and compaction find the segments free.
SETTLED = 256


def register_many(
    catalog: "Catalog",
    store: "Store",
    base: "BaseShapes",
    base_digest: str,
    entries: Iterable[Entry],
    owner: str,
    now: float,
    dtype: "torch.dtype",
) -> Iterator[Registered]:
    """Register adapters of `base` at `now` (epoch seconds); yield each one's result once it is committed.

    An entry's tensors are held until they are copied together with those of later entries: they must not
    change. An entry whose tensors torch changed meanwhile is refused; writes to their memory by other means
    go unnoticed.

    Policies must be in the catalog and belong to `owner`. An unfit entry is refused by name and the others go
    on; results come some batches at a time, those of one shape in order. Raises `ServiceError` when store or
    catalog cannot be written: what was yielded is safe, and the same entries may be given again.
    """
    admission = BulkAdmission(catalog, base, base_digest, owner, dtype)
    groups: dict[BatchForm, Group] = {}
    held = 0
    writer = Writer(catalog, store, base_digest, owner, now)
    with _Pipeline(writer, admission) as pipeline:
        for position, entry in enumerate(entries):
            try:
                form, tensors = admission.admit(entry)
            except AdapterError as error:
                yield Registered(position, entry.policy, None, False, str(error))
                continue
            group = groups.get(form)
            if group is None:
                group = groups[form] = Group(form, writer.tables)
            group.add(BulkRow(position, entry.policy, entry.parent, entry.step), tensors)
            held += form.nbytes
            if group.is_full or held >= HELD_BYTES:
                fullest = group if group.is_full else max(groups.values(), key=lambda group: group.nbytes)
                held -= fullest.nbytes
                yield from pipeline.put(groups.pop(fullest.form))
        while groups:
            yield from pipeline.put(groups.popitem()[1])
        yield from pipeline.drain()


class _Pipeline:
    """Checks one batch in this thread while the writer's threads hash, write and commit those before it."""

    def __init__(self, writer: Writer, admission: BulkAdmission):
        self._writer, self._admission = writer, admission
        self._behind = deque[Future[PlacedBatch]](maxlen=BEHIND)
        # Batches that wait to be committed together, and the bytes of each.
        self._placed: dict[Future[PlacedBatch], int] = {}
        self._batches = 0
        self._committed: deque[tuple[list[Future[PlacedBatch]], Future[list[Registered]]]] = deque()
        self._unsettled = 0

    def __enter__(self) -> "_Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        # Finish what was handed over, also when the caller stops iterating.
        self._commit()
        self._writer.close()

    def put(self, group: Group) -> Iterator[Registered]:
        """Hand a group over; yield its refused entries and the results committed meanwhile."""
        rows, values_ND, refused = group.take(self._admission.faults(group.policies))
        yield from refused
        if rows:
            if len(self._behind) == BEHIND:
                wait([self._behind[0]])
            placed = self._writer.place(group.form, values_ND, rows)
            self._behind.append(placed)
            self._placed[placed] = len(rows) * group.form.nbytes
            self._batches += 1
            self._unsettled += 1
        # A batch that could not be stored ends the run: nothing is handed over after it.
        failed = any(one.done() and one.exception() for one in self._placed)
        together = min(MOST_TOGETHER, max(TOGETHER, self._batches // SHARE_TOGETHER))
        if len(self._placed) >= together or self._held_bytes() >= HELD_BYTES or failed:
            self._commit()
        if self._unsettled >= SETTLED:
            yield from self.drain()
        yield from self._written(0 if failed else 1)

    def drain(self) -> Iterator[Registered]:
        """Commit what is left, yield its results and release the segments."""
        self._commit()
        yield from self._written(0)
        self._writer.settle()
        self._unsettled = 0

    def _commit(self) -> None:
        if self._placed:
            placed = list(self._placed)
            self._committed.append((placed, self._writer.commit(placed)))
            self._placed = {}

    def _held_bytes(self) -> int:
        """Return the bytes held in memory until their rows are committed."""
        return sum(
            nbytes
            for one, nbytes in self._placed.items()
            if not one.done() or (not one.exception() and one.result().batch is not None)
        )

    def _written(self, most: int) -> Iterator[Registered]:
        """Yield committed results, and wait until at most `most` transactions are under way."""
        while self._committed and (len(self._committed) > most or self._committed[0][1].done()):
            batches, registered = self._committed.popleft()
            yield from registered.result()
            for placed in batches:
                # Raises the store's error, if any.
                placed.result()
