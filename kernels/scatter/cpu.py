"""A packed adapter's values into slot buffers, by torch copies: one for each block, none for an expert.

Knows a flat blob and strided views. Does not know modules, layouts or who owns the slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """One block: where it begins in the blob (elements), and its place in every slot.

    `destination` is a view (slots, n0, n1, n2) with any strides; the blob holds n0*n1*n2 elements of
    it, n2 fastest. `offset` None clears the view instead: what the last occupant left there.
    """

    offset: int | None
    destination: Tensor


def scatter(blob_N: Tensor, copies: Sequence[Copy], slot: int) -> None:
    """Fill one slot of every destination from the blob."""
    for copy in copies:
        target = copy.destination[slot]
        if copy.offset is None:
            target.zero_()
        else:
            target.copy_(blob_N[copy.offset : copy.offset + target.numel()].view(target.shape))
