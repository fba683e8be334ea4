"""Batches of adapters of the same names, shapes and dtype: checked, hashed and packed together.

The results equal those of `revision.digest` and `packed.pack` for each adapter alone, byte for byte.

Shapes: N adapters, D elements of an adapter, B bytes of a packed one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# In one call of C++: a view of each tensor from Python takes as long as all the rest.
from torch._utils import _flatten_dense_tensors

from engine.adapters import packed
from engine.adapters.revision import Shapes, digest_header, is_finite, largest_rank, targets_of, validate
from engine.base.families import BaseShapes
from engine.errors import AdapterError


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

    @property
    def sizes(self) -> list[int]:
        """Return the elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

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
    tensors: Mapping[str, Tensor], base: BaseShapes, modules: Shapes, base_digest: str, dtype: torch.dtype
) -> BatchForm:
    """Return the form of an adapter, checked by names, shapes and dtypes but not by values.

    `modules` is `base.modules()`. Raises `AdapterError` as `revision.validate` does, and when the adapter is
    not in the serving `dtype`.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1 and dtypes != {dtype}:
        raise AdapterError(
            f"The adapter is in {_name(dtypes.pop())}, the engine serves {_name(dtype)}. Convert it, or set "
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


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of an adapter's tensors as one (D). Raises `AdapterError` where they have no values."""
    try:
        with torch.no_grad():
            return _flatten_dense_tensors(tensors).cpu()
    except RuntimeError as error:
        raise AdapterError(f"The adapter's values cannot be read: {str(error).splitlines()[0]}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
