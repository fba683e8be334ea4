"""Time LoRA on experts with its gradients, at a trainer's width: ours, torch's grouped product, and a loop.

    python tests/bench/kernels/experts_gradients.py [--tokens 4096] [--ranks 8 16 32] [--repeats 20]

One projection of Qwen3-30B-A3B's experts: 128 experts, 8 a token, hidden 2048, width 768. On a GPU ours are
the Triton kernels, on a CPU `cpu_grouped`, which shares one sorting among all products. All three do
forward and backward from the same leaves, for one adapter and for four, and must agree, or no figure counts.

`share` is how near ours comes to the machine: the longer of two times, over ours. One is for the bytes that
every way must move (rows, factors and gradients, once each, at what a copy reaches in the same run), the
other for the products (at what one large product reaches).
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from kernels.experts import autograd as experts_grad
from kernels.experts import cpu_grouped as experts_grouped
from kernels.experts import triton as experts_triton

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.helpers import routed_batches as testing

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
ADAPTERS = (1, 4)
COPY_BYTES, PRODUCT = 1 << 30, 8192


@dataclass(frozen=True)
class Layer:
    """Leaves x (T, I), a (S, E, R, I), b (S, E, O, R), and slots (T), experts (T, K) and dy (T, K, O)."""

    x: Tensor
    a: Tensor
    b: Tensor
    slots: Tensor
    experts: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.a, self.b


Way = Callable[[Layer], Tensor]


def layer(
    tokens: int, adapters: int, rank: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Layer:
    """Return random leaves with gradients; every token has an adapter, by turns."""
    g = torch.Generator(device).manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    slots = torch.arange(tokens, device=device) % adapters
    chosen = torch.rand(tokens, EXPERTS, generator=g, device=device).argsort(1)[:, :TOP_K]
    x = random(tokens, inputs).requires_grad_()
    a = (random(adapters, EXPERTS, rank, inputs) / inputs**0.5).requires_grad_()
    b = random(adapters, EXPERTS, outputs, rank).requires_grad_()
    return Layer(x, a, b, slots, chosen, random(tokens, TOP_K, outputs))


def ours(given: Layer) -> Tensor:
    ops = experts_triton if given.x.is_cuda else experts_grouped
    return experts_grad.lora(*given.leaves, given.slots, given.experts, ops=ops)


def grouped(given: Layer) -> Tensor:
    """Sort the pairs by segment, and take torch's grouped product twice."""
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # type: ignore[attr-defined]
    segment_P = (given.slots[:, None] * EXPERTS + given.experts).flatten()
    order = segment_P.argsort(stable=True)
    ends = torch.bincount(segment_P, minlength=len(given.a) * EXPERTS).cumsum(0).to(torch.int32)
    a_GIR, b_GRO = (factor.flatten(0, 1).transpose(1, 2) for factor in (given.a, given.b))
    h_PR = product(given.x[order // TOP_K], a_GIR, offs=ends)
    y_PO = product(h_PR, b_GRO, offs=ends)
    return torch.empty_like(y_PO).index_copy(0, order, y_PO).view(*given.experts.shape, -1)


def loop(given: Layer) -> Tensor:
    """Take each segment's products by themselves."""
    segment_P = (given.slots[:, None] * EXPERTS + given.experts).flatten()
    ordered, order = segment_P.sort(stable=True)
    present, counts = torch.unique_consecutive(ordered, return_counts=True)
    # Taken apart once: the gradient of an index is as large as all the factors.
    a_G, b_G = given.a.flatten(0, 1).unbind(), given.b.flatten(0, 1).unbind()
    found = [
        given.x[pairs // TOP_K] @ a_G[segment].T @ b_G[segment].T
        for segment, pairs in zip(present.tolist(), order.split(counts.tolist()), strict=True)
    ]
    y_PO = torch.cat(found)
    return torch.empty_like(y_PO).index_copy(0, order, y_PO).view(*given.experts.shape, -1)


WAYS: dict[str, Way] = {"ours": ours, "grouped": grouped, "loop": loop}


def step(way: Way, given: Layer) -> list[Tensor]:
    """Return the output and the leaves' gradients."""
    y = way(given)
    return [y.detach(), *torch.autograd.grad(y, given.leaves, given.dy)]


def seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median of some calls after two to warm up, each waited for."""
    found = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limit_s(given: Layer, bytes_s: float, operations_s: float) -> float:
    """Return the least time that forward and backward can take on a machine of such rates."""
    tokens, pairs = len(given.x), given.experts.numel()
    rank, inputs, outputs = given.a.shape[2], given.x.shape[1], given.b.shape[2]
    # Forward: x, a and b in, y out. Backward: dy, x, a and b in, dx, da and db out.
    numbers = 3 * tokens * inputs + 2 * pairs * outputs + 3 * (given.a.numel() + given.b.numel())
    operations = 3 * 2 * pairs * rank * (inputs + outputs)
    return max(numbers * given.x.element_size() / bytes_s, operations / operations_s)


def rates(device: torch.device, dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """Return bytes a second of a copy, read and written, and operations a second of a large product."""
    small = device.type == "cpu"
    size, side = (COPY_BYTES >> 4, PRODUCT >> 3) if small else (COPY_BYTES, PRODUCT)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy_s = seconds(lambda: target.copy_(source), repeats, device)
    return 2 * size / copy_s, 2 * side**3 / seconds(lambda: left @ right, repeats, device)


def compare(given: Layer, repeats: int) -> dict[str, float]:
    """Return each way's seconds; `SystemExit` when they disagree by more than rounding."""
    wanted = step(loop, given)
    tolerance = 32 * testing.EPS[given.x.dtype]
    found = {}
    for name, way in WAYS.items():
        errors = [testing.error(got, want) for got, want in zip(step(way, given), wanted, strict=True)]
        if not max(errors) <= tolerance:
            raise SystemExit(
                f"{name} is off by {max(errors):.2g}, more than {tolerance:.2g}; no figure counts."
            )
        few = max(repeats // 5, 2) if way is loop else repeats
        device = given.x.device
        found[name] = seconds(lambda way=way: step(way, given), few, device)  # type: ignore[misc]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bytes_s, operations_s = rates(device, dtype, options.repeats)
    print(f"{device}, {dtype}: copy {bytes_s / 1e9:.0f} GB/s, product {operations_s / 1e12:.2f} TFLOP/s")
    print(f"{'':32}{'ours ms':>10}{'grouped ms':>12}{'loop ms':>10}{'over grouped':>14}{'share':>8}")
    for name, widths in (("up", (HIDDEN, WIDTH)), ("down", (WIDTH, HIDDEN))):
        for adapters in ADAPTERS:
            for rank in options.ranks:
                given = layer(options.tokens, adapters, rank, *widths, device, dtype)
                took = compare(given, options.repeats)
                share = limit_s(given, bytes_s, operations_s) / took["ours"]
                each = "".join(
                    f"{took[way] * 1e3:>{width}.2f}" for way, width in zip(WAYS, (10, 12, 10), strict=True)
                )
                case = f"{name}, rank {rank}, {adapters} adapter{'s' * (adapters > 1)}"
                print(f"{case:32}{each}{took['grouped'] / took['ours']:>14.2f}{share:>8.2f}")


if __name__ == "__main__":
    main()
