"""Copy a packed adapter's values into slot buffers on a GPU: `scatter` as one Triton launch.

All blocks of an adapter, in all layers, share one launch. A table on the device holds each block's offset in
the blob and the address and strides of its destination. The blob crosses the bus in one copy, and no block
costs a launch.
"""
# Triton interprets kernel annotations itself, so kernels have none for mypy.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scatter.cpu import Copy

BLOCK = 1024
COLUMNS = 9


@dataclass(frozen=True)
class Table:
    """Copies as int64 numbers on the device, made once for a layout and its buffers.

    `rows` (C, 9): offset (-1: clear), elements, n1, n2, address, strides of slot, n0, n1 and n2. `programs`
    (B, 2): each program's row and first element. `copies` keep the buffers alive.
    """

    rows: Tensor
    programs: Tensor
    copies: tuple[Copy, ...]


def unsupported_reason(blob_N: Tensor, copies: Sequence[Copy]) -> str | None:
    """Return why the kernel cannot make these copies, or None."""
    if blob_N.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the blob is on {blob_N.device}: use a CUDA device, or set TRITON_INTERPRET=1 before import."
    for i, copy in enumerate(copies):
        to, elements = copy.destination, copy.destination[0].numel()
        if to.device != blob_N.device or to.dtype != blob_N.dtype:
            return f"copy {i} is {to.dtype} on {to.device}, the blob {blob_N.dtype} on {blob_N.device}."
        if elements >= 2**31:
            return f"copy {i} has {elements} elements; a block may have at most 2^31 - 1."
        if copy.offset is not None and copy.offset + elements > blob_N.numel():
            return f"copy {i} ends at element {copy.offset + elements} of a blob of {blob_N.numel()}."
    return None


def table(blob_N: Tensor, copies: Sequence[Copy]) -> Table:
    """Return the kernel's table of these copies. Raises `ValueError` with `unsupported_reason`."""
    reason = unsupported_reason(blob_N, copies)
    if reason is not None:
        raise ValueError(f"The scatter kernel cannot make these copies: {reason}")
    rows: list[list[int]] = []
    programs: list[list[int]] = []
    for i, copy in enumerate(copies):
        to, elements = copy.destination, copy.destination[0].numel()
        offset = -1 if copy.offset is None else copy.offset
        rows.append([offset, elements, *to.shape[2:], to.data_ptr(), *to.stride()])
        programs.extend([i, first] for first in range(0, elements, BLOCK))
    device = blob_N.device
    return Table(
        torch.tensor(rows, dtype=torch.int64, device=device).view(-1, COLUMNS),
        torch.tensor(programs, dtype=torch.int64, device=device).view(-1, 2),
        tuple(copies),
    )


@triton.jit
def scatter_kernel(blob, rows, programs, slot, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = rows + tl.load(programs + tl.program_id(0) * 2) * COLUMNS
    first = tl.load(programs + tl.program_id(0) * 2 + 1)
    offset = tl.load(row)
    n1 = tl.load(row + 2).to(tl.int32)
    n2 = tl.load(row + 3).to(tl.int32)
    to = tl.load(row + 4).to(tl.pointer_type(blob.dtype.element_ty))
    element = first.to(tl.int32) + tl.arange(0, BLOCK)
    live = element < tl.load(row + 1)
    at = slot * tl.load(row + 5)
    at += (element // (n1 * n2)) * tl.load(row + 6)
    at += (element // n2 % n1) * tl.load(row + 7)
    at += (element % n2) * tl.load(row + 8)
    source = offset + element.to(tl.int64)
    # A clearing copy has offset -1: it reads nothing and stores zeros.
    values = tl.load(blob + source, mask=live & (source >= element), other=0.0)
    tl.store(to + at, values, mask=live)


def scatter(blob_N: Tensor, table: Table, slot: int) -> None:
    """Fill one slot of every destination from the blob (N,) in one launch."""
    if len(table.programs):
        scatter_kernel[(len(table.programs),)](
            blob_N, table.rows, table.programs, slot, COLUMNS=COLUMNS, BLOCK=BLOCK
        )
