"""Time LoRA on experts at decode width: the loop over (expert, adapter) that one writes first, and ours.

    python tests/bench/kernels/experts_decode.py [--threads 2] [--repeats 30]

One layer's down projection: 64 tokens, each at 8 of 64 experts, rank 8, hidden 256. Prints
milliseconds (median, fastest) of the two, and the load of the machine beside them.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from kernels.experts import cpu as experts

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.helpers import routed_batches as testing

TOKENS, TOP_K, EXPERTS, HIDDEN, RANK = 64, 8, 64, 256, 8
MIXES = {
    "64 adapters": list(range(TOKENS)),
    "1 adapter": [0] * TOKENS,
    "4 adapters, half base": [token // 2 % 4 if token % 2 else -1 for token in range(TOKENS)],
}


def loop(y_TO: Tensor, batch: testing.Routed) -> None:
    """Sort the pairs once, then add each (adapter, expert)'s product in turn."""
    segments = torch.where(batch.slots[:, None] >= 0, batch.slots[:, None] * EXPERTS + batch.experts, -1)
    ordered, order = segments.flatten().sort(stable=True)
    present, counts = torch.unique_consecutive(ordered, return_counts=True)
    x_PI, weights_P = batch.x.flatten(0, 1), batch.weights.flatten()
    for segment, pairs in zip(present.tolist(), order.split(counts.tolist()), strict=True):
        if segment >= 0:
            slot, expert = divmod(segment, EXPERTS)
            delta = x_PI[pairs] @ batch.a[slot, expert].T @ batch.b[slot, expert].T
            y_TO.index_add_(0, pairs // TOP_K, delta * weights_P[pairs, None])


def ours(y_TO: Tensor, batch: testing.Routed) -> None:
    """Plan, shrink and expand, as a layer does."""
    plan = experts.plan(batch.slots, batch.experts)
    assert plan is not None
    h = experts.shrink(batch.x, batch.a, plan)
    experts.expand(y_TO, h, batch.b.transpose(-1, -2), plan, batch.weights)


def milliseconds(
    run: Callable[[Tensor, testing.Routed], None], y_TO: Tensor, batch: testing.Routed, repeats: int
) -> tuple[float, float]:
    """Return the median and the fastest of some runs, after two to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run(y_TO, batch)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:]) * 1e3, min(seconds[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"{options.threads} threads of {os.cpu_count()} cores, load {load}")
    print(f"{'':24}{'dtype':16}{'loop ms':>18}{'ours ms':>18}{'ratio':>8}")
    for name, slots in MIXES.items():
        for dtype in (torch.float32, torch.bfloat16):
            batch = testing.routed(slots, TOP_K, EXPERTS, RANK, HIDDEN, HIDDEN, rows="pair", dtype=dtype)
            batch = testing.Routed(
                batch.x, batch.a, testing.rank_major(batch.b), batch.slots, batch.experts, batch.weights
            )
            results = [torch.zeros(TOKENS, HIDDEN, dtype=dtype) for _ in range(2)]
            loop(results[0], batch)
            ours(results[1], batch)
            near = testing.error(results[1], results[0]) <= 16 * testing.EPS[dtype]
            if not near:
                raise SystemExit(f"{name}, {dtype}: the two disagree; no figure counts.")
            scratch = torch.zeros(TOKENS, HIDDEN, dtype=dtype)
            slow = milliseconds(loop, scratch, batch, max(options.repeats // 5, 3))
            fast = milliseconds(ours, scratch, batch, options.repeats)
            row = f"{slow[0]:>9.2f} {slow[1]:>8.2f}{fast[0]:>9.3f} {fast[1]:>8.3f}{slow[0] / fast[0]:>8.1f}"
            print(f"{name:24}{str(dtype).removeprefix('torch.'):16}{row}")


if __name__ == "__main__":
    main()
