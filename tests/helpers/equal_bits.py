"""Whose bits depend on how many rows stand beside them, in products at the shapes of the built bases.

    python tests/helpers/equal_bits.py float32 [--quick]

A process of its own, since MKL reads its variable once. Prints a JSON object: what MKL says of itself, and a
case for each number of threads, shape and part, with the numbers of rows at which bits differ.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.base.toys.recipes import RECIPES

ROWS = 96
# Around powers of 2: in bfloat16 oneDNN compiles kernels for each number of rows, which takes its time.
FEW = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, ROWS)
# Where a slice of rows begins in the larger batch: no multiple of a vector's length.
OFFSET = 3
STRICT = 0x10000
# MKL numbers its branches, this one and newer ones upwards; 2 is a CPU that it has no branch for.
AVX2 = 10
PARTS = ("forward", "rows' gradient", "weight's gradient")


def mkl() -> dict[str, bool]:
    """Return whether MKL was asked for its strict mode, and whether this CPU has kernels for it."""
    if not torch.backends.mkl.is_available():
        return {"there": False, "asked": False, "kept": False}
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    asked = bool(library.mkl_serv_cbwr_get(-1) & STRICT)
    return {"there": True, "asked": asked, "kept": asked and library.mkl_serv_cbwr_get_auto_branch() >= AVX2}


def shapes(*names: str) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of these bases' projections, and of one that is wider than any."""
    found = {(576, 576)}
    for name in names:
        sizes = RECIPES[name].config()
        hidden = sizes["hidden_size"]
        inner = [sizes["intermediate_size"], sizes.get("moe_intermediate_size", hidden)]
        found |= {(hidden, width) for width in inner} | {(width, hidden) for width in inner}
        found |= {(hidden, sizes["vocab_size"])}
        if "kv_lora_rank" in sizes:
            latent = sizes["kv_lora_rank"]
            heads = sizes["num_attention_heads"] * (sizes["qk_nope_head_dim"] + sizes["v_head_dim"])
            found |= {
                (hidden, latent + sizes["qk_rope_head_dim"]),
                (latent, heads),
                (hidden, sizes["q_lora_rank"]),
            }
    return sorted(found)


def passed(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product, and the gradients of rows and of the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = linear(x, weight)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


def compared(inputs: int, outputs: int, dtype: torch.dtype) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Yield the number of rows, the part, what they give alone, and what they give in a larger batch."""
    x, dy, weight = (
        torch.randn(*size).to(dtype)
        for size in ((ROWS + OFFSET, inputs), (ROWS + OFFSET, outputs), (outputs, inputs))
    )
    whole = passed(x, weight, dy)
    for rows in FEW if dtype == torch.bfloat16 else range(1, ROWS + 1):
        part = slice(OFFSET, OFFSET + rows)
        alone = passed(x[part].clone(), weight, dy[part].clone())
        sliced = passed(x[part], weight, dy[part])
        expected = whole[0][part], whole[1][part], sliced[2]
        for name, own, other in zip(PARTS, alone, expected, strict=True):
            yield rows, name, own, other


def cases(dtype: torch.dtype, threads: int, inputs: int, outputs: int) -> list[dict[str, Any]]:
    """Return each part's case: `differ`, numbers of rows, and `far`, by how much of the largest value."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    differ: dict[str, list[int]] = {part: [] for part in PARTS}
    far = dict.fromkeys(PARTS, 0.0)
    for rows, part, own, other in compared(inputs, outputs, dtype):
        if not torch.equal(own, other):
            differ[part].append(rows)
            distance = (own.double() - other.double()).abs().max() / other.double().abs().max()
            far[part] = max(far[part], distance.item())
    shared = {"threads": threads, "shape": [inputs, outputs]}
    return [{**shared, "part": part, "differ": differ[part], "far": far[part]} for part in PARTS]


def main() -> None:
    dtype, quick = getattr(torch, sys.argv[1]), "--quick" in sys.argv
    names = ("tiny-dense", "tiny-moe", "tiny-mla") if dtype == torch.float32 else ("tiny-dense",)
    sizes = shapes(*names)
    chosen = [(1, sizes[:1])] if quick else [(1, sizes), (2, sizes)]
    found = [case for threads, some in chosen for size in some for case in cases(dtype, threads, *size)]
    print(json.dumps({"mkl": mkl(), "cases": found}))


if __name__ == "__main__":
    main()
