"""The reference implementation of the expert operations: slow and obvious. Every other one must equal it.

Shapes: I input features, O output features, R rank, S slots (one adapter each), T tokens, K experts of
a token, E experts (or 1: one factor for all of them).
"""

from collections.abc import Iterator

from torch import Tensor


def routed(factor_SE: Tensor, slots_T: Tensor, experts_TK: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield (token, k, slot, expert) of every routed pair with an adapter."""
    shared = factor_SE.shape[1] == 1
    for t, slot in enumerate(slots_T.tolist()):
        for k, expert in enumerate(experts_TK[t].tolist()):
            if slot >= 0:
                yield t, k, slot, 0 if shared else expert


def shrink_experts(x: Tensor, a_SERI: Tensor, slots_T: Tensor, experts_TK: Tensor) -> Tensor:
    """Return h (T, K, R), `A[slot, expert] @ x` of each pair; zero where a token has no adapter.

    `x` is (T, I), one row for all experts of a token, or (T, K, I).
    """
    h_TKR = x.new_zeros(*experts_TK.shape, a_SERI.shape[2])
    for t, k, slot, expert in routed(a_SERI, slots_T, experts_TK):
        h_TKR[t, k] = a_SERI[slot, expert] @ (x[t] if x.dim() == 2 else x[t, k])
    return h_TKR


def expand_experts(
    y: Tensor,
    h_TKR: Tensor,
    b_SEOR: Tensor,
    slots_T: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None = None,
) -> None:
    """Add `weight * B[slot, expert] @ h` of each pair to `y` in place.

    `y` is (T, K, O), one row for each pair, or (T, O), the sum over a token's experts. Rows of tokens
    without an adapter are unchanged. Without weights the weight is 1.
    """
    for t, k, slot, expert in routed(b_SEOR, slots_T, experts_TK):
        delta_O = b_SEOR[slot, expert] @ h_TKR[t, k]
        target_O = y[t] if y.dim() == 2 else y[t, k]
        target_O += delta_O if weights_TK is None else weights_TK[t, k] * delta_O
