"""Batches of adapters of the same names, shapes and dtype: checked, hashed and packed together.

The results equal those of `revision.digest` and `packed.pack` for each adapter alone, byte for byte.

Shapes: N adapters, D elements of an adapter, B bytes of a packed one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# In one call of C++: a view of each tensor from Python takes as long as all the rest.
from torch._utils import _flatten_dense_tensors

from engine.adapters import packed
from engine.adapters.revision import digest_header, is_finite, largest_rank, targets_of, validate
from engine.base.families import BaseShapes
from engine.errors import AdapterError


@dataclass(frozen=True, eq=False)
class BatchForm:
    """What adapters of the same shapes share; `keys` are sorted, the order in which values are hashed."""

    keys: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    rank: int
    header: bytes
    layout: packed.PackedLayout

    @cached_property
    def sizes(self) -> list[int]:
        """Return the elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of one adapter's tensors."""
        return sum(self.sizes) * self.dtype.itemsize

    def first_fault(self, values_D: Tensor) -> str:
        """Return the message that names the first tensor of an adapter with NaN or Inf."""
        columns = zip(self.keys, values_D.split(self.sizes), strict=True)
        key = next(key for key, values in columns if not is_finite(values))
        return f"The tensor {key} holds NaN or Inf; this adapter cannot be served."

    def digests(self, values_ND: Tensor) -> list[str]:
        """Return each adapter's digest."""
        start, digests = hashlib.sha256(self.header), []
        for row in values_ND.view(torch.uint8).numpy():
            state = start.copy()
            state.update(row)
            digests.append(state.hexdigest())
        return digests

    def pack(self, values_ND: Tensor) -> list[memoryview]:
        """Return each adapter's packed bytes, laid out as `layout` says."""
        columns = zip(self.keys, self.shapes, values_ND.split(self.sizes, dim=1), strict=True)
        factors = {key: column.unflatten(1, shape) for key, shape, column in columns}
        # Padding between blocks is zero.
        payload_NB = torch.zeros(len(values_ND), self.layout.nbytes, dtype=torch.uint8)
        packed_values = payload_NB.view(self.dtype)
        for block in self.layout.blocks:
            start = block.offset // self.dtype.itemsize
            values = packed_values[:, start : start + block.count].unflatten(1, block.shape)
            for module, target in packed.projections(block, values):
                factor = factors[f"{module}.lora_{block.side}"]
                target.copy_(factor if block.side == "A" else factor.mT)
        return [row.data for row in payload_NB.numpy()]


def form_of(
    names: Sequence[str],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    base: BaseShapes,
    base_digest: str,
    dtype: torch.dtype,
) -> BatchForm:
    """Return the form of adapters whose tensors have these names, shapes and dtypes, in the names' order.

    Raises `AdapterError` as `revision.validate` does, and when they are not in the serving `dtype`.
    """
    if len(set(dtypes)) == 1 and dtypes[0] != dtype:
        raise AdapterError(
            f"The adapter is in {_name(dtypes[0])}, the engine serves {_name(dtype)}. Convert it, or set "
            "`engine.dtype`."
        )
    # Expanded zeros: no memory, and no values that could fail, so that only names and shapes are checked.
    tensors = {
        name: torch.zeros((), dtype=one).expand(shape)
        for name, shape, one in zip(names, shapes, dtypes, strict=True)
    }
    validate(tensors, None, base.modules())
    rank = largest_rank(tensors)
    header = digest_header(tensors, rank, targets_of(names), base_digest)
    layout = packed.pack(tensors, dtype, base.fused).layout
    return BatchForm(tuple(names), tuple(shapes), dtype, rank, header, layout)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of an adapter's tensors as one (D). Raises `AdapterError` where they have no values."""
    try:
        with torch.no_grad():
            return _flatten_dense_tensors(tensors).cpu()
    except RuntimeError as error:
        raise AdapterError(f"The adapter's values cannot be read: {str(error).splitlines()[0]}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
