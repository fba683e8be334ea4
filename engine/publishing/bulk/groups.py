"""Groups of entries of one form that wait to become a batch, and the check of their values.

An adapter's tensors are many small objects all over the memory. They are copied a few adapters at a time,
while the CPU cache still has what their admission read.

Shapes: N adapters, D elements of an adapter.
"""

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor

from engine.publishing.bulk.batches import BatchForm, Tables, finite_rows, first_fault, stack
from engine.publishing.bulk.entries import BulkRow, Registered, refusal

# The most adapters of a batch, and its bytes: enough to share the wait for an fsync.
BATCH = 2048
BATCH_BYTES = 16 << 20
# Bytes that are copied together.
COPIED_BYTES = 1 << 20
VERSION = attrgetter("_version")
CHANGED = "The adapter's tensors were changed before they were registered. Give each entry its own."


class Group:
    """Collects entries of `form`, in tables of `tables`."""

    def __init__(self, form: BatchForm, tables: Tables):
        self.form = form
        self.count = 0
        self._tables = tables
        self._most = max(1, min(BATCH, -(-BATCH_BYTES // form.nbytes)))
        self._together = max(1, COPIED_BYTES // form.nbytes)
        # Copied entries: their rows, and as many first rows of the table.
        self._rows: list[BulkRow] = []
        self._table: Tensor | None = None
        self._refused: list[Registered] = []
        # Entries to copy; the version tells whether their tensors were written to meanwhile.
        self._waiting: list[tuple[BulkRow, tuple[Tensor, ...], int]] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of the entries' tensors."""
        return self.count * self.form.nbytes

    @property
    def is_full(self) -> bool:
        """Say whether the group is a whole batch."""
        return self.count >= self._most

    def add(self, row: BulkRow, tensors: tuple[Tensor, ...]) -> None:
        """Add an entry, with tensors in the order of the form's keys."""
        self._waiting.append((row, tensors, _version(tensors)))
        self.count += 1
        if len(self._waiting) >= self._together:
            self._copy()

    @property
    def policies(self) -> set[str]:
        """Return the policies of the entries."""
        return {row.policy for row in (*self._rows, *(row for row, _, _ in self._waiting))}

    def take(self, faults: Mapping[str, str]) -> tuple[list[BulkRow], Tensor, list[Registered]]:
        """Return the rows that can be served, their values (N, D), and the refused entries.

        `faults` says why entries of a policy are refused.
        """
        self._copy()
        rows, refused = self._rows, self._refused
        if self._table is None:
            return [], torch.empty(0, 1), refused
        values_ND = self._table[: len(rows)]
        finite_N = finite_rows(values_ND)
        if faults or not finite_N.all():
            kept = []
            for number, (row, finite) in enumerate(zip(rows, finite_N.tolist(), strict=True)):
                fault = faults.get(row.policy)
                if fault or not finite:
                    refused.append(refusal(row, fault or first_fault(self.form, values_ND[number])))
                else:
                    kept.append(number)
            rows, values_ND = [rows[number] for number in kept], values_ND[kept]
        return rows, values_ND, refused

    def _copy(self) -> None:
        """Copy the waiting entries; refuse those that changed or cannot be read."""
        same = []
        for row, tensors, version in self._waiting:
            if version == _version(tensors):
                same.append((row, tensors))
            else:
                self._refused.append(refusal(row, CHANGED))
        self._waiting.clear()
        if not same:
            return
        if self._table is None:
            width = self.form.nbytes // self.form.dtype.itemsize
            self._table = self._tables.take(self._most, width, self.form.dtype)
        start = len(self._rows)
        try:
            stack(self.form, [tensors for _, tensors in same], self._table[start : start + len(same)])
        except RuntimeError:
            # Sparse tensors, or some on another device: torch refuses the whole stack.
            self._copy_each(same, self._table)
        else:
            self._rows += [row for row, _ in same]

    def _copy_each(self, entries: list[tuple[BulkRow, tuple[Tensor, ...]]], table: Tensor) -> None:
        for row, tensors in entries:
            start = len(self._rows)
            try:
                stack(self.form, [tensors], table[start : start + 1])
                self._rows.append(row)
            except RuntimeError as error:
                reason = f"The adapter's values cannot be read: {str(error).splitlines()[0]}"
                self._refused.append(refusal(row, reason))


def _version(tensors: tuple[Tensor, ...]) -> int:
    """Return a number that grows when torch writes to one of the tensors; inference tensors have none."""
    try:
        return sum(map(VERSION, tensors))
    except RuntimeError:
        return 0
