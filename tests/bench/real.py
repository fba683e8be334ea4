"""A step on a real model against the machine's limit: share of peak, seconds, and the trainer's memory.

    graftwork bench real [--base smollm2-135m] [--repeats N] [--long]     (after `make real`)

A step is 16 questions with 8 samples each, of at most 32 tokens at temperature 1, with a random adapter of
rank 8 on every projection, float32. The peak is the best of 5 products of each of the model's own shapes, on
the threads that the update uses. The FLOPs of a rollout are those of each prompt once and of each sampled
token; those of an update are forward and the gradients of inputs, each prompt once, nothing recomputed; both
with attention and LoRA. An update runs as in the trainer, in this process: `peak_memory_gb` is its peak.
`rollout_over_plain` is a rollout over vLLM's own server without LoRA, with the same settings, on the same
prompts for as many tokens of each; they take turns until it is decided. The default ends after 15 minutes.
No figure counts unless the trainer's mean importance ratio on the samples is 1 within 1e-3.
"""

import asyncio
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import _record as record
import httpx
import torch
from _run import Run, options, start
from torch.nn.functional import linear

from engine.base.prompts import prompt_ids
from engine.base.resident import BaseInfo, base_config, ensure_base
from engine.base.sizes import Shape
from engine.settings.params import Params, load_params
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow, stream_tokens
from engine.training.model.update import LossCall, forward_backward
from engine.training.sample_groups import Sample, Sampling, sample_groups
from engine.training.service.app import load_base
from tests.helpers.live import RunningEngine, StockServer, start_engine, stop_engine
from tests.helpers.parity import random_adapter

QUESTIONS, GROUP, MOST_TOKENS, RANK = 16, 8, 32, 8
PLACES = (
    "France", "Japan", "Egypt", "Peru", "Norway", "Kenya", "Italy", "Canada", "Chile", "Poland", "India",
    "Cuba", "Greece", "Spain", "Ghana", "Nepal",
)  # fmt: skip
ASKED = "What is the capital of {}, and what is it known for? Answer in one short sentence."
BOUNDS = {
    "update_share_of_peak": record.at_least(0.5),
    "rollout_over_plain": record.at_most(1.15),
    "peak_memory_gb": record.at_most(3),
}
LIMIT_S = 600
# Engine and trainer each compute alone here, so each takes every core.
CORES = len(os.sched_getaffinity(0))


def best_rate(base: ResidentBase, shape: Shape) -> float:
    """Return the most FLOPs a second of 5 products of each of the model's shapes, on the update's threads."""
    sizes = {*base.shapes.linear.values(), (shape.hidden, shape.vocabulary)}
    best = 0.0
    for inputs, outputs in sizes:
        rows, weight = torch.randn(base.microbatch_tokens, inputs), torch.randn(outputs, inputs)
        for _ in range(5):
            began = time.perf_counter()
            linear(rows, weight)
            spent = time.perf_counter() - began
            best = max(best, 2 * rows.numel() * outputs / spent)
    return best


def layer_flops(shape: Shape, tokens: int, keys: int, rank: int) -> float:
    """Return the FLOPs of all layers for tokens that together see so many keys, with LoRA."""
    projections = sum(one.count * one.size[0] * one.size[1] for one in shape.shapes.projections())
    products = tokens * (projections + rank * shape.lora_width)
    return 2.0 * (products + 2 * shape.layers * shape.queries * keys)


def keys_of(rows: Sequence[TokenRow]) -> int:
    """Return how many keys all tokens of these rows see, prompts once; a row's last token is not computed."""
    prompts = {row.prompt for row in rows}
    own = sum(sum(range(row.start + 1, len(row.tokens))) for row in rows)
    return own + sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in prompts)


def step_flops(shape: Shape, rows: Sequence[TokenRow]) -> dict[str, float]:
    """Return the FLOPs of a rollout and of an update; a gradient of attention has twice its products."""
    tokens, keys, answered = stream_tokens(rows), keys_of(rows), sum(row.length for row in rows)
    head = 2.0 * answered * shape.hidden * shape.vocabulary
    forward = layer_flops(shape, tokens, keys, RANK) + head
    attention = 4.0 * shape.layers * shape.queries * keys
    return {"rollout": forward, "update": 2 * forward + attention}


def sampled(
    run: Run, base: BaseInfo, repeats: int | None
) -> tuple[dict, list[Example], dict[str, list[float]]]:
    """Return an adapter, the engine's samples of it, and the figures of each pair of rollouts."""
    from transformers import AutoTokenizer

    from engine.base.families import BaseShapes

    tokenizer = AutoTokenizer.from_pretrained(base.path)
    prompts = [prompt_ids(tokenizer, ASKED.format(place)) for place in PLACES]
    tensors = random_adapter(BaseShapes.read(base.path).modules(), 1, size=0.01)
    sampling = Sampling(group_size=GROUP, max_tokens=MOST_TOKENS, seed=1)
    with tempfile.TemporaryDirectory() as state, ExitStack() as stack:
        engine = start_engine(base.path, Path(state), wait_s=LIMIT_S)
        stack.callback(stop_engine, engine)
        plain = stack.enter_context(StockServer(base.path, "float32", threads=CORES))
        name = engine.publish("real", tensors, RANK)

        def ours() -> list[list[Sample]]:
            return sample_groups(engine.url, engine.key, name, prompts, sampling)

        # The first ones load the adapter and warm up; a rollout's seed is the same each time.
        examples = examples_of(prompts, ours())
        sides = {"rollout_s": ours, "plain_rollout_s": lambda: asyncio.run(answered(plain, examples))}
        sides["plain_rollout_s"]()

        def take(repeat: int) -> dict[str, float]:
            seconds = {}
            for side in record.in_turn(sides, repeat):
                began = time.perf_counter()
                sides[side]()
                seconds[side] = time.perf_counter() - began
            return {**seconds, "rollout_over_plain": seconds["rollout_s"] / seconds["plain_rollout_s"]}

        found = run.pairs("rollouts, pair", take, BOUNDS, share=0.7, most=repeats)
    return tensors, examples, found


def examples_of(prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sample]]) -> list[Example]:
    """Return the samples with random advantages."""
    draw = random.Random(1)
    return [
        Example(TokenRow((*prompt, *one.tokens), len(prompt)), one.logprobs,
                (draw.gauss(0, 1),) * len(one.tokens))
        for prompt, group in zip(prompts, groups, strict=True) for one in group
    ]  # fmt: skip


async def answered(server: RunningEngine | StockServer, examples: Sequence[Example]) -> None:
    """Have the base sample as many tokens to each prompt, all at once.

    Without seeds: vLLM 0.32.0 on a CPU ends when a seeded prompt is computed in two steps.
    """
    limits = httpx.Limits(max_connections=len(examples))
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as client:
        bodies = [
            {"model": "stock", "prompt": list(one.row.prompt), "max_tokens": one.row.length,
             "temperature": 1, "ignore_eos": True}
            for one in examples
        ]  # fmt: skip
        for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)):
            answer.raise_for_status()


def updated(
    run: Run, base: ResidentBase, tensors: dict, examples: list[Example], repeats: int
) -> tuple[list[float], float]:
    """Return the seconds of each update, and the mean importance ratio."""
    adapter, ratio = base.hold(tensors), math.nan

    def take(_: int) -> float:
        nonlocal ratio
        began = time.perf_counter()
        (found,) = forward_backward(base, [LossCall(adapter, examples, "importance_sampling", {})])
        seconds = time.perf_counter() - began
        adapter.clear_gradients()
        ratio = found.metrics.importance_ratio
        return seconds

    # The first one warms up.
    return run.repeats("update", take, share=0.9, most=1 + repeats)[1:], ratio


def peak_memory() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, help="rollouts, at most, and updates (3)")
    given = parser.parse_args()
    run = Run("real", given.long, minutes=15)
    settings = load_params(given.params)
    params = Params.model_validate({"base": {"name": given.base}, "state_dir": settings.state_dir})
    info = ensure_base(params.base, params.paths)
    shape = Shape.of(base_config(params.base, params.paths))
    tensors, examples, rollouts = sampled(run, info, given.repeats)
    base = load_base(params, info.path, None)
    torch.set_num_threads(CORES)
    update_s, ratio = updated(run, base, tensors, examples, given.repeats or 3)
    memory, rate = peak_memory(), best_rate(base, shape)
    flops = step_flops(shape, [example.row for example in examples])
    result = record.Figures()
    result.add_pairs(rollouts)
    result.add({
        "update_s": update_s,
        "rollout_share_of_peak": [flops["rollout"] / rate / spent for spent in rollouts.get("rollout_s", [])],
        "update_share_of_peak": [flops["update"] / rate / spent for spent in update_s],
    })  # fmt: skip
    result.values |= {
        "peak_memory_gb": memory,
        "peak_gflops": rate / 1e9,
        "rollout_gflop": flops["rollout"] / 1e9,
        "update_gflop": flops["update"] / 1e9,
        "microbatch_tokens": float(base.microbatch_tokens),
        "answer_tokens": sum(example.row.length for example in examples) / len(examples),
        "importance_ratio": ratio,
    }
    record.report(run, result, BOUNDS, abs(ratio - 1) <= 1e-3, given.out)


if __name__ == "__main__":
    start(main)
