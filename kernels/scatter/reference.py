"""The reference implementation of `scatter`: slow and obvious. Every other one must equal it."""

from torch import Tensor


def scatter(blob_N: Tensor, offset: int, destination: Tensor) -> None:
    """Fill a strided 3-D view from the elements of `blob` (N,) starting at `offset`, last axis fastest."""
    position = offset
    for i in range(destination.shape[0]):
        for j in range(destination.shape[1]):
            for k in range(destination.shape[2]):
                destination[i, j, k] = blob_N[position]
                position += 1
