"""Batches of adapters of the same names, shapes and dtype: checked, hashed and packed together.

The results equal those of `revision.digest` and `packed.pack` for each adapter alone, byte for byte.

Shapes: N adapters, D elements of an adapter, B bytes of a packed one, R rank, I inputs, O outputs.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.adapters import packed
from engine.adapters.revision import Shapes, digest_header, is_finite, largest_rank, targets_of, validate
from engine.base.families import BaseShapes
from engine.errors import AdapterError
from engine.publishing.bulk.row_hashes import hash_rows
from engine.store.checksums import BLAKE3_FROM, checksum_of

# Tables kept for reuse: one being filled, one being hashed, two being written.
SPARE = 4


@dataclass(frozen=True, eq=False)
class BatchForm:
    """What adapters of the same shapes share. `keys` are sorted; `nbytes` is of one adapter's tensors."""

    keys: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    rank: int
    nbytes: int
    header: bytes
    layout: packed.PackedLayout


@dataclass(frozen=True)
class AdapterBatch:
    """Adapters of one form, with a digest each; `checksums` are those of the rows of `payload_NB` (uint8)."""

    form: BatchForm
    digests: list[str]
    payload_NB: Tensor
    checksums: list[str]

    def payloads(self) -> list[memoryview]:
        """Return each adapter's B packed bytes, as views without a copy."""
        count, size = self.payload_NB.shape
        data = memoryview(self.payload_NB.view(-1).numpy())  # type: ignore[arg-type]
        return [data[start : start + size] for start in range(0, count * size, size)]


class Tables:
    """Reusable memory for batches: fresh pages would take 5% of all CPU time.

    A table has the values that were left in it. Thread-safe.
    """

    def __init__(self) -> None:
        self._spare = deque[Tensor](maxlen=SPARE)

    def take(self, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return an unused table (count, width) of `dtype`."""
        nbytes = count * width * dtype.itemsize
        # The caller may be in inference mode, while other threads write to the table later.
        with torch.inference_mode(False):
            memory = torch.empty(0, dtype=torch.uint8)
            with suppress(IndexError):
                memory = self._spare.popleft()
            # A much larger one would waste memory.
            if not nbytes <= len(memory) <= 2 * nbytes:
                memory = torch.empty(nbytes, dtype=torch.uint8)
            return memory[:nbytes].view(dtype).view(count, width)

    def give(self, table: Tensor) -> None:
        """Take back a table that is no longer read."""
        with torch.inference_mode(False):
            self._spare.append(torch.empty(0, dtype=torch.uint8).set_(table.untyped_storage()))


def form_of(
    tensors: Mapping[str, Tensor], base: BaseShapes, modules: Shapes, base_digest: str, dtype: torch.dtype
) -> BatchForm:
    """Return the form of an adapter, checked by names, shapes and dtypes but not by values.

    `modules` is `base.modules()`. Raises `AdapterError` as `revision.validate` does, and when the adapter is
    not in the serving `dtype`.
    """
    found = {tensor.dtype for tensor in tensors.values()}
    if len(found) == 1 and found != {dtype}:
        raise AdapterError(
            f"The adapter is in {_name(found.pop())}, the engine serves {_name(dtype)}. Convert it, or set "
            "`engine.dtype`."
        )
    keys = tuple(sorted(tensors))
    # Expanded zeros: no memory, and no values that could fail, so that only names and shapes are checked.
    empty = {key: torch.zeros((), dtype=dtype).expand(tensors[key].shape) for key in keys}
    validate({key: value.to(tensors[key].dtype) for key, value in empty.items()}, None, modules)
    rank = largest_rank(empty)
    return BatchForm(
        keys=keys,
        shapes=tuple(value.shape for value in empty.values()),
        dtype=dtype,
        rank=rank,
        nbytes=sum(value.numel() for value in empty.values()) * dtype.itemsize,
        header=digest_header(empty, rank, targets_of(keys), base_digest),
        layout=packed.pack(empty, dtype, base.fused).layout,
    )


def stack(form: BatchForm, adapters: Sequence[Sequence[Tensor]], values_ND: Tensor) -> None:
    """Copy N adapters' values into `values_ND`; `adapters` hold tensors in the order of `form.keys`."""
    columns = values_ND.split([shape.numel() for shape in form.shapes], dim=1)
    with torch.no_grad():
        for column, tensors in zip(columns, zip(*adapters, strict=True), strict=True):
            column.copy_(torch.stack(tensors).flatten(1))


def finite_rows(values_ND: Tensor) -> Tensor:
    """Return a bool tensor (N): whether no value of an adapter is NaN or infinite."""
    if is_finite(values_ND):
        # Nearly always, and decided in a fiftieth of the time.
        return torch.ones(len(values_ND), dtype=torch.bool)
    return values_ND.isfinite().all(dim=1)


def first_fault(form: BatchForm, values_D: Tensor) -> str:
    """Return the message that names the first tensor of an adapter with NaN or Inf."""
    sizes = [shape.numel() for shape in form.shapes]
    for key, values in zip(form.keys, values_D.split(sizes), strict=True):
        if not is_finite(values):
            return f"The tensor {key} holds NaN or Inf; this adapter cannot be served."
    raise AssertionError("every value is finite")


def batch_of(form: BatchForm, values_ND: Tensor, tables: Tables, compiled: bool = False) -> AdapterBatch:
    """Hash and pack checked adapters (N, D) of the form's dtype; `compiled` as for `hash_rows`."""
    digests = hash_rows(form.header, values_ND.view(torch.uint8).numpy(), compiled)
    payload_NB = pack_rows(form, values_ND, tables)
    rows_NB = payload_NB.numpy()
    is_large = form.layout.nbytes >= BLAKE3_FROM
    sums = [checksum_of(row.data) for row in rows_NB] if is_large else hash_rows(b"", rows_NB, compiled)
    return AdapterBatch(form, digests, payload_NB, sums)


def pack_rows(form: BatchForm, values_ND: Tensor, tables: Tables) -> Tensor:
    """Return each adapter's packed bytes, uint8 (N, B), laid out as `form.layout` says."""
    sizes = [shape.numel() for shape in form.shapes]
    columns = zip(form.keys, form.shapes, values_ND.split(sizes, dim=1), strict=True)
    factors = {key: column.unflatten(1, shape) for key, shape, column in columns}
    payload_NB = tables.take(len(values_ND), form.layout.nbytes, torch.uint8)
    packed_values = payload_NB.view(form.dtype)
    starts = [block.offset for block in form.layout.blocks]
    for block, end in zip(form.layout.blocks, [*starts[1:], form.layout.nbytes], strict=True):
        # Padding before the next block.
        payload_NB[:, block.offset + block.count * form.dtype.itemsize : end] = 0
        start = block.offset // form.dtype.itemsize
        values = packed_values[:, start : start + block.count].unflatten(1, block.shape)
        for module, target in packed.projections(block, values):
            factor = factors[f"{module}.lora_{block.side}"]
            target.copy_(factor if block.side == "A" else factor.mT)
    return payload_NB


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
