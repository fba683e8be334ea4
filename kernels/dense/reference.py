"""The reference implementation of `add_lora`: slow and obvious. Every other one must equal it.

Shapes: N rows, I input features, O output features, R rank, S slots (one adapter each).
"""

from collections.abc import Sequence

from torch import Tensor


def add_lora(y_NO: Tensor, x_NI: Tensor, a_SRI: Tensor, b_SRO: Tensor, slots: Sequence[int]) -> None:
    """Add `x @ A.T @ B` of each row's slot to `y` in place; rows with slot < 0 are unchanged.

    Source: Hu et al. 2021, arXiv 2106.09685, equation 3, with the scaling folded into B.
    """
    for row, slot in enumerate(slots):
        if slot >= 0:
            y_NO[row] += (x_NI[row] @ a_SRI[slot].T) @ b_SRO[slot]
