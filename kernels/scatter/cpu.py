"""Copy a packed adapter's values into slot buffers with torch: one copy for each block of the file."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """One block: its offset in the blob (in elements) and its destination in every slot.

    `destination` is a view (slots, n0, n1, n2) with any strides; the blob holds n0*n1*n2 elements for each
    slot, n2 fastest. With `offset` None the view is cleared of the previous adapter's values instead.
    """

    offset: int | None
    destination: Tensor


def scatter(blob_N: Tensor, copies: Sequence[Copy], slot: int) -> None:
    """Fill one slot of every destination from the blob (N,), which has the destinations' dtype."""
    for copy in copies:
        target = copy.destination[slot]
        if copy.offset is None:
            target.zero_()
        else:
            target.copy_(blob_N[copy.offset : copy.offset + target.numel()].view(target.shape))
