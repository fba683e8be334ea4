"""Gradients of LoRA on a mixture of experts under PyTorch's autograd, for the trainer.

The backward of a shrink is an expand and vice versa, so no new operation is needed. `ops` is the module that
computes: `cpu` or `cpu_grouped`, or `triton` on a GPU.

Shapes: T tokens, L tokens with an adapter, K experts of a token, R rank, I inputs, O outputs, S
slots, E experts (or 1: shared).
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from kernels.experts import cpu as experts


class Shrink(Function):
    """`ops.shrink` with gradients for x and A."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a_SERI: Tensor, plan: Any, ops: Any) -> Tensor:
        """Return h (L, K, R) of x (T, I) or (T, K, I) and A (S, E, R, I)."""
        ctx.plan, ctx.ops = plan, ops
        ctx.save_for_backward(x, a_SERI)
        return ops.shrink(x, a_SERI, plan).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and A."""
        x, a_SERI = ctx.saved_tensors
        dx = da_SERI = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(x)
            ctx.ops.expand(dx, grads[0], a_SERI, ctx.plan)
        if ctx.needs_input_grad[1]:
            da_SERI = ctx.ops.outer(grads[0], x, a_SERI.shape[1], len(a_SERI), ctx.plan)
        return dx, da_SERI, None, None


class Expand(Function):
    """`ops.expand` onto zeros, with gradients for h, B and the routing weights."""

    @staticmethod
    def forward(
        ctx: Any,
        h_LKR: Tensor,
        b_SEOR: Tensor,
        weights_TK: Tensor | None,
        shape: torch.Size,
        plan: Any,
        ops: Any,
    ) -> Tensor:
        """Return y of `shape` from h (L, K, R), B (S, E, O, R) and weights (T, K) or None."""
        ctx.plan, ctx.ops = plan, ops
        ctx.save_for_backward(h_LKR, b_SEOR, weights_TK)
        y = h_LKR.new_zeros(shape)
        ops.expand(y, h_LKR, b_SEOR.transpose(-1, -2), plan, weights_TK)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of h, B and the weights."""
        h_LKR, b_SEOR, weights_TK = ctx.saved_tensors
        plan, dy = ctx.plan, grads[0]
        dh_LKR = db_SEOR = dw_TK = None
        weights_LK1 = None if weights_TK is None else plan.rows(weights_TK)[..., None]
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            dh_LKR = ctx.ops.shrink(dy, b_SEOR.transpose(-1, -2), plan)
        if ctx.needs_input_grad[2]:
            dw_TK = torch.zeros_like(weights_TK)
            rows = slice(None) if plan.tokens is None else plan.tokens
            dw_TK[rows] = (dh_LKR * h_LKR).sum(-1).to(dw_TK.dtype)
        if weights_LK1 is not None:
            h_LKR = (h_LKR * weights_LK1).to(dy.dtype)
            dh_LKR = None if dh_LKR is None else (dh_LKR * weights_LK1).to(dy.dtype)
        if ctx.needs_input_grad[1]:
            db_SEOR = ctx.ops.outer(h_LKR, dy, b_SEOR.shape[1], len(b_SEOR), plan).transpose(-1, -2)
        return dh_LKR, db_SEOR, dw_TK, None, None, None


def lora(
    x: Tensor,
    a_SERI: Tensor,
    b_SEOR: Tensor,
    slots_T: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None = None,
    reduce: bool = False,
    ops: ModuleType = experts,
    plan: Any = None,
) -> Tensor:
    """Return `B[slot, expert] @ A[slot, expert] @ x` of each pair, (T, K, O), with gradients.

    `x` is (T, I) or (T, K, I). With `reduce` the result is (T, O), summed over a token's experts.
    `weights_TK` multiplies each pair. Tokens with slot < 0 give zero. `plan` is `ops.plan(slots_T,
    experts_TK)` when several factors share it. x, A and B have one floating dtype, which the result has too.
    """
    outputs = b_SEOR.shape[2]
    shape = (len(x), outputs) if reduce else (*experts_TK.shape, outputs)
    plan = plan or ops.plan(slots_T, experts_TK)
    if plan is None:
        return x.new_zeros(shape)
    return Expand.apply(Shrink.apply(x, a_SERI, plan, ops), b_SEOR, weights_TK, torch.Size(shape), plan, ops)
