"""Registration in bulk: tens of thousands of adapters a second from one process into catalog and store.

Adapters are collected by shape into batches; a batch is checked, named and packed while the one before it
is written. Bytes are appended and fsynced before the rows that name them are committed, so that a kill at
any moment leaves whole revisions or none. What makes an entry unfit is known to `entries.py` and, by its
values, to `groups.py`. For callers from Python alone, who need nothing but `__all__`.
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

# What may wait for more of its shape, all shapes together.
HELD_BYTES = 8 * BATCH_BYTES
# Batches under way to the store: one that is named, and one whose bytes are written.
BEHIND = 2
# Batches that are committed together, at least and, the longer a run is, at most. Digests are random, so
# that a row changes a page of the index: among 16,000 rows many change the same, and SQLite writes a fifth
# of what it writes for 2,000 at a time.
TOGETHER, MOST_TOGETHER = 8, 32
# One in so many of the batches so far is as many as are committed together.
SHARE_TOGETHER = 2
# Batches after which all are waited for, so that those who clean up the store find their segments free.
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
    """Register adapters of `base` at `now` (epoch seconds) and yield what became of each, once committed.

    An entry's tensors are kept until those of some more entries are copied with them: they must stay as they
    are. One whose tensors were changed meanwhile is refused where torch notices, which it does not when
    their memory is written to by something else.

    Policies must be in the catalog and `owner`'s. An entry that does not fit is refused by name and the
    others go on; results come some batches at a time, those of one shape in order. Raises `ServiceError`
    when store or catalog cannot be written: what was yielded is safe, and the same entries may be given
    again.
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
    """Checks one batch in this thread while the writer's threads name, write and commit those before it."""

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
        # What was handed over is written to its end, also when the caller has lost interest.
        self._commit()
        self._writer.close()

    def put(self, group: Group) -> Iterator[Registered]:
        """Hand a group over, and yield its refused entries and what has been committed meanwhile."""
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
        # A batch that the store did not take ends the run: nothing more is handed over behind it.
        failed = any(one.done() and one.exception() for one in self._placed)
        together = min(MOST_TOGETHER, max(TOGETHER, self._batches // SHARE_TOGETHER))
        if len(self._placed) >= together or self._held_bytes() >= HELD_BYTES or failed:
            self._commit()
        if self._unsettled >= SETTLED:
            yield from self.drain()
        yield from self._written(0 if failed else 1)

    def drain(self) -> Iterator[Registered]:
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
        """Return the bytes that are in memory until their rows are committed."""
        return sum(
            nbytes
            for one, nbytes in self._placed.items()
            if not one.done() or (not one.exception() and one.result().batch is not None)
        )

    def _written(self, most: int) -> Iterator[Registered]:
        """Yield what has been committed, and wait until at most so many transactions have not."""
        while self._committed and (len(self._committed) > most or self._committed[0][1].done()):
            batches, registered = self._committed.popleft()
            yield from registered.result()
            for placed in batches:
                # Raises what kept it out of the store.
                placed.result()
