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
    """`ops.expand` onto zeros, with gradients for h and B."""

    @staticmethod
    def forward(ctx: Any, h_LKR: Tensor, b_SEOR: Tensor, shape: torch.Size, plan: Any, ops: Any) -> Tensor:
        """Return y of `shape` (T, K, O) from h (L, K, R) and B (S, E, O, R)."""
        ctx.plan, ctx.ops = plan, ops
        ctx.save_for_backward(h_LKR, b_SEOR)
        y = h_LKR.new_zeros(shape)
        ops.expand(y, h_LKR, b_SEOR.transpose(-1, -2), plan)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of h and B."""
        h_LKR, b_SEOR = ctx.saved_tensors
        dh_LKR = db_SEOR = None
        if ctx.needs_input_grad[0]:
            dh_LKR = ctx.ops.shrink(grads[0], b_SEOR.transpose(-1, -2), ctx.plan)
        if ctx.needs_input_grad[1]:
            outer = ctx.ops.outer(h_LKR, grads[0], b_SEOR.shape[1], len(b_SEOR), ctx.plan)
            db_SEOR = outer.transpose(-1, -2)
        return dh_LKR, db_SEOR, None, None, None


def lora(
    x: Tensor,
    a_SERI: Tensor,
    b_SEOR: Tensor,
    slots_T: Tensor,
    experts_TK: Tensor,
    ops: ModuleType = experts,
    plan: Any = None,
) -> Tensor:
    """Return `B[slot, expert] @ A[slot, expert] @ x` of each pair, (T, K, O), with gradients.

    `x` is (T, I) or (T, K, I). Tokens with slot < 0 give zero. `plan` is `ops.plan(slots_T, experts_TK)` when
    several factors share it. x, A and B have one floating dtype, which the result has too.
    """
    shape = torch.Size((*experts_TK.shape, b_SEOR.shape[2]))
    plan = plan or ops.plan(slots_T, experts_TK)
    if plan is None:
        return x.new_zeros(shape)
    return Expand.apply(Shrink.apply(x, a_SERI, plan, ops), b_SEOR, shape, plan, ops)
