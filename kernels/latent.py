"""LoRA on the up-projection of latent attention in its absorbed form, for rows of many adapters on CPU.

Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) keeps one latent c for each
token; `kv_b_proj` computes from it each head's key part k = W_K c and value v = W_V c. Decode never computes
those: it scores (q W_K) . c, averages the latents, and multiplies the average by W_V. With an adapter the
weights are W + B A, so the query gains (q B_K) A, and the value gains B_V (A x) of the averaged latent x.

Rows without an adapter are in no tile: their values are unchanged, bit for bit. `per_head` gives a row
the same bits in any batch.

Shapes: N rows, K tiles, T rows a tile, H heads, L latent, P key part without position, V value, R rank,
S slots, O = H * (P + V) outputs of `kv_b_proj`, head by head, D and E widths.
"""

import torch
from torch import Tensor

from kernels.dense.cpu import TilePlan

# MKL sums up to three rows after the last full block of four in another order (float32), so rows are padded
# to whole blocks; 16 leaves a margin for other processors' kernels.
BLOCK = 16


def per_head(x_NHD: Tensor, weight_HDE: Tensor) -> Tensor:
    """Return each head's rows (N, H, D) times its weight (H, D, E), (N, H, E), independent of the batch."""
    rows = -(-len(x_NHD) // BLOCK) * BLOCK
    padded = x_NHD.new_zeros(rows, *x_NHD.shape[1:])
    padded[: len(x_NHD)] = x_NHD
    y = x_NHD.new_empty(rows, len(weight_HDE), weight_HDE.shape[2])
    torch.bmm(padded.transpose(0, 1), weight_HDE, out=y.transpose(0, 1))
    return y[: len(x_NHD)]


def add_to_queries(y_NHL: Tensor, q_NHP: Tensor, a_SRL: Tensor, b_SRO: Tensor, plan: TilePlan) -> None:
    """Add (q B_K) A to the absorbed queries `y` in place; `a` and `b` are the slots' factors."""
    q_KTHP = plan.fill(q_NHP)
    b_KRHP = _heads(b_SRO, q_NHP.shape[1], plan)[..., : q_NHP.shape[2]]
    h_KHTR = q_KTHP.transpose(1, 2) @ b_KRHP.permute(0, 2, 3, 1)
    delta = h_KHTR.transpose(1, 2).flatten(1, 2) @ a_SRL[plan.slots]
    _add(y_NHL, delta, plan)


def add_to_values(y_NHV: Tensor, x_NHL: Tensor, a_SRL: Tensor, b_SRO: Tensor, plan: TilePlan) -> None:
    """Add B_V (A x) of the averaged latents `x` to the heads' values `y` in place; see `add_to_queries`."""
    x_KTHL = plan.fill(x_NHL)
    b_KRHV = _heads(b_SRO, x_NHL.shape[1], plan)[..., -y_NHV.shape[2] :]
    h = x_KTHL.flatten(1, 2) @ a_SRL[plan.slots].transpose(1, 2)
    h_KTHR = h.view(*x_KTHL.shape[:3], -1)
    delta_KHTV = h_KTHR.transpose(1, 2) @ b_KRHV.transpose(1, 2)
    _add(y_NHV, delta_KHTV.transpose(1, 2), plan)


def _heads(b_SRO: Tensor, heads: int, plan: TilePlan) -> Tensor:
    """Return the tiles' B factors as (K, R, H, P + V)."""
    return b_SRO[plan.slots].unflatten(2, (heads, -1))


def _add(y: Tensor, delta: Tensor, plan: TilePlan) -> None:
    """Add the tiles' values to their rows; padding is skipped."""
    plan.add(y, plan.drain(delta.reshape(plan.tiles, plan.tile, *y.shape[1:])))
