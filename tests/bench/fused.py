"""One forward and backward for several policies against one after another: seconds of an update each way.

    graftwork bench fused [--bases tiny-dense tiny-moe] [--repeats 5]

Each policy has so many samples in groups of eight, prompts of 16 to 24 tokens, completions of 3 to 24, an
adapter of its own on every projection, rank 8, 4 or 16 in turn. Both ways run in turn on the same examples;
figures are medians of the CPU's seconds. `rule` says how often `is_worth_fusing` picks the faster way, or one
within 10% of it: for less it keeps to turns. Gradients must agree to 1e-6, or no figure counts.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import _record as record
import torch
from _run import Run, options, start

from engine.base.resident import ensure_base
from engine.settings.params import BaseConfig, load_params
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from engine.training.model.update import LossCall, forward_backward, is_worth_fusing
from tests.helpers.resident_bases import resident

POLICIES = (1, 3, 9)
SAMPLES = (8, 16, 32, 128)
GROUP = 8
RANKS = (8, 4, 16)
MICROBATCH_TOKENS = 2048
TOLERANCE = 1e-6


def examples(samples: int, seed: int) -> list[Example]:
    draw = random.Random(seed)
    found = []
    for _ in range(samples // GROUP):
        prompt = [draw.randrange(3, 340) for _ in range(draw.randint(16, 24))]
        for _ in range(GROUP):
            own = [draw.randrange(3, 340) for _ in range(draw.randint(3, 24))]
            old, advantages = (-5.8,) * len(own), (draw.gauss(0, 1),) * len(own)
            found.append(Example(TokenRow((*prompt, *own), len(prompt)), old, advantages))
    return found


def calls_of(base: ResidentBase, policies: int, samples: int) -> list[LossCall]:
    calls = []
    for number in range(policies):
        generator = torch.Generator().manual_seed(number)
        rank = RANKS[number % len(RANKS)]
        adapter = base.new_adapter(rank, 2.0 * rank, base.shapes.targets, generator)
        with torch.no_grad():
            for key, factor in adapter.factors.items():
                if key.endswith("lora_B"):
                    factor.copy_(torch.randn(factor.shape, generator=generator) * 0.02)
        calls.append(LossCall(adapter, examples(samples, number), "importance_sampling", {}))
    return calls


def in_turns(base: ResidentBase, calls: list[LossCall]) -> None:
    for call in calls:
        forward_backward(base, [call])


def gradients(calls: list[LossCall], run: Callable[[], object]) -> list[torch.Tensor]:
    run()
    found = [factor.grad.clone() for call in calls for factor in call.adapter.factors.values()]
    for call in calls:
        call.adapter.clear_gradients()
    return found


def seconds(calls: list[LossCall], run: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    run()
    spent = time.perf_counter() - began, time.process_time() - cpu
    for call in calls:
        call.adapter.clear_gradients()
    return spent


def compare(base: ResidentBase, calls: list[LossCall], repeats: int) -> tuple[dict[str, float], bool]:
    """Return the medians of both ways, and whether their gradients agree."""
    ways = {
        "turns": lambda: in_turns(base, calls),
        "fused": lambda: forward_backward(base, calls),
    }
    one, other = (gradients(calls, run) for run in ways.values())
    worst = max((left - right).abs().max().item() for left, right in zip(one, other, strict=True))
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in record.in_turn(ways, number):
            spent[name].append(seconds(calls, ways[name]))
    figures = {"error": worst}
    for name, values in spent.items():
        figures[f"{name}_s"] = record.median([wall for wall, _ in values])
        figures[f"{name}_cpu_s"] = record.median([cpu for _, cpu in values])
    figures["ratio"] = figures["turns_cpu_s"] / figures["fused_cpu_s"]
    return figures, worst <= TOLERANCE and max(value.abs().max() for value in one) > 1e-3


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--bases", nargs="+", default=["tiny-dense", "tiny-moe"])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    run = Run("fused", given.long)
    paths = load_params(given.params).paths
    figures: dict[str, float] = {}
    agree, chosen = [], []

    def compare_shape(base: ResidentBase, suffix: str, policies: int, samples: int) -> None:
        calls = calls_of(base, policies, samples)
        found, agrees = compare(base, calls, given.repeats)
        agree.append(agrees)
        figures.update({f"{key}.{suffix}": value for key, value in found.items()})
        ratio = found["ratio"] if is_worth_fusing(base, calls) else 1 / found["ratio"]
        chosen.append(ratio > 0.9)

    bases = {
        name: resident(ensure_base(BaseConfig(name=name), paths).path, 1, MICROBATCH_TOKENS)
        for name in given.bases
    }
    run.parts(
        *(
            partial(compare_shape, base, f"{name}.n{policies}.s{samples}", policies, samples)
            for (name, base), policies, samples in product(bases.items(), POLICIES, SAMPLES)
        )
    )
    if chosen:
        figures["rule"] = sum(chosen) / len(chosen)
    record.report(run, record.Figures(figures), {"rule": record.at_least(1)}, all(agree), given.out)


if __name__ == "__main__":
    start(main)
