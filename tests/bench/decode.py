"""Decode with many adapters: our engine against one without LoRA, and against stock vLLM's LoRA.

    graftwork bench decode [--base tiny-dense | --base tiny-moe | --base wide-moe | --base smollm2-135m]
                           [--repeats N] [--long]

64 requests at once, each with an adapter of its own on every target, rank 8. Decode is what 128 more
tokens a request cost, so prompts and connections drop out; prefill is what prompts of 96 tokens cost. All
engines are up at once and take turns; each repeat has prompts of its own, so that no cache helps.
`share_of_base`: ours over an engine without LoRA. `over_stock`: ours over stock vLLM with the same adapters
(which has none for experts on a CPU). The engines take turns until both are decided. `--long` measures all
three bases, prefill too, and the base's own rows beside adapters. All have one environment, process settings
and limits: those that our engine has by default. The figures are of bfloat16 on every core but one, those of
smollm2-135m of float32, the default on a CPU; on tiny-dense those with a prefix are of float32, and of two
threads.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import _record as record
import httpx
import torch
from _run import Run, options, start

from engine.base.families import BaseShapes
from engine.base.names import PACKAGED
from engine.base.resident import ensure_base
from engine.base.toys.recipes import RECIPES
from engine.settings.params import BaseConfig, load_params
from tests.helpers.live import RunningEngine, StockServer, start_engine, stop_engine
from tests.helpers.made_adapters import write
from tests.helpers.parity import ask, weight_of

BATCH, RANK = 64, 8
PROMPT, SHORT, LONG = 16, 4, 132
PREFILL = 96
BASES = ("tiny-dense", "tiny-moe", "wide-moe")
# Figure: ours, and what it is compared with.
RATIOS = {
    "share_of_base": ("decode", "ours", "base"),
    "over_stock": ("decode", "ours", "stock"),
    "prefill_share_of_base": ("prefill", "ours", "base"),
    "prefill_over_stock": ("prefill", "ours", "stock"),
    "base_rows_share_of_base": ("decode", "ours_base", "base"),
}
BOUNDS = dict.fromkeys(RATIOS, record.at_least())
BOUNDS |= {"share_of_base": record.at_least(0.6), "over_stock": record.at_least(1.5)}
# By prefix of the figures: dtype, and threads as in the engine's settings.
PLAIN: dict[str, tuple[str, int]] = {"": ("bfloat16", 0)}
VARIANTS = {"tiny-dense": PLAIN | {"float32_": ("float32", 0), "two_threads_": ("bfloat16", 2)}}
# A real model computes for seconds in bfloat16 on a CPU without instructions for it.
VARIANTS |= {name: {"": ("float32", 0)} for name in PACKAGED}
# A bfloat16 answer is this near to float32's reference, and far from it under another adapter.
NEAR = 0.1
Server = RunningEngine | StockServer


def make_base(name: str, params: Path, root: Path) -> Path:
    """Return a packaged model, or a base of a recipe's shape, trained for seconds: weights do not matter."""
    from engine.base.toys.build import build

    if name in PACKAGED:
        return ensure_base(BaseConfig(name=name), load_params(params).paths).path
    recipe = RECIPES[name]
    directory = root / name
    directory.mkdir()
    short = replace(recipe, steps=min(recipe.steps, 20), problems=2048)
    build(short, 1, directory, lambda *_: None)
    return directory


def adapters(shapes: BaseShapes, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Make 64 adapters on every target, of the values that `dtype` holds."""
    made = []
    for seed in range(BATCH):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for module, (inputs, outputs) in shapes.modules().items():
            a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, RANK, generator=generator) * 0.1
            tensors |= {f"{module}.lora_A": a.to(dtype), f"{module}.lora_B": b.to(dtype)}
        made.append(tensors)
    return made


def prompts(seed: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 300, (BATCH, length), generator=generator).tolist()


async def generate(server: Server, names: list[str], asked: list[list[int]], tokens: int) -> None:
    """Send all requests at once, and wait for every answer. No side pays for log-probabilities."""
    headers = {"authorization": f"Bearer {server.key}"}
    limits = httpx.Limits(max_connections=BATCH)
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120, limits=limits) as client:
        bodies = [body | {"model": name, "prompt": ids} for name, ids in zip(names, asked, strict=True)]
        for answer in await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies)):
            answer.raise_for_status()


def seconds(server: Server, names: list[str], seed: int, length: int, tokens: int) -> float:
    asked = prompts(seed, length)
    started = time.perf_counter()
    asyncio.run(generate(server, names, asked, tokens))
    return time.perf_counter() - started


def speeds(server: Server, names: list[str], seed: int, with_prefill: bool) -> dict[str, float]:
    """Return tokens a second of decode, and of prefill."""
    short, long = (seconds(server, names, seed + i, PROMPT, n) for i, n in enumerate((SHORT, LONG)))
    found = {"decode": BATCH * (LONG - SHORT) / (long - short)}
    if with_prefill:
        found["prefill"] = BATCH * PREFILL / seconds(server, names, seed + 2, PREFILL, 1)
    return found


def is_right(engine: RunningEngine, names: list[str], made: list[dict[str, torch.Tensor]]) -> bool:
    """Say whether answers are their own adapter's: by transformers in float32, B @ A in the weights."""
    from transformers import AutoModelForCausalLM

    asked = prompts(0, PROMPT)
    answers = asyncio.run(ask(engine, list(zip(names, asked, strict=True)), 12))
    near = []
    for tensors, prompt, answer in list(zip(made, asked, answers, strict=True))[:: BATCH // 4]:
        model = AutoModelForCausalLM.from_pretrained(engine.base_path, dtype=torch.float32)
        ids = torch.tensor([prompt + answer["ids"]])
        off = []
        for added in (False, True):
            if added:
                for module in {key.rpartition(".lora_")[0] for key in tensors}:
                    a, b = tensors[f"{module}.lora_A"].float(), tensors[f"{module}.lora_B"].float()
                    weight_of(model, module).add_(b @ a)
            with torch.no_grad():
                found = model(ids).logits.log_softmax(-1)[0, PROMPT - 1 : -1]
            found = found.gather(1, ids[0, PROMPT:, None])[:, 0]
            off.append((found - torch.tensor(answer["logprobs"])).abs().median().item())
        near.append(off[1] < NEAR and off[0] > 2 * off[1])
    return all(near)


def stock_with_adapters(base: Path, shapes: BaseShapes, made: list, root: Path, **how) -> StockServer:
    paths = [write(root / f"a{i}", tensors, "plain", shapes) for i, tensors in enumerate(made)]
    modules = [f"a{i}={path}" for i, path in enumerate(paths)]
    more = [
        "--enable-lora",
        "--max-loras",
        str(BATCH),
        "--max-lora-rank",
        str(RANK),
        "--lora-modules",
        *modules,
    ]
    return StockServer(base, more=more, **how)


def measure(
    run: Run, base: Path, dtype: str, threads: int, repeats: int | None, root: Path, share: float
) -> tuple[dict[str, list[float]], bool]:
    """Return each ratio and speed of each repeat, and whether our answers are right."""
    shapes, torch_dtype = BaseShapes.read(base), getattr(torch, dtype)
    made = adapters(shapes, torch_dtype)
    how = {"dtype": dtype, "threads": threads}
    with ExitStack() as stack:
        engine = start_engine(base, root / "state", wait_s=600, **how)
        stack.callback(stop_engine, engine)
        names = [engine.publish("decode", tensors, RANK, torch_dtype) for tensors in made]
        sides: dict[str, tuple[Server, list[str]]] = {"ours": (engine, names)}
        if run.is_long:
            sides["ours_base"] = (engine, [engine.base_name] * BATCH)
        sides["base"] = (stack.enter_context(StockServer(base, **how)), ["stock"] * BATCH)
        if not shapes.experts:
            stock = stock_with_adapters(base, shapes, made, root, **how)
            sides["stock"] = (stack.enter_context(stock), [f"a{i}" for i in range(BATCH)])
        turns = Turns(sides, run.is_long)
        right = is_right(engine, names, made)
        turns.take(-1)
        found = run.pairs(f"{base.name} in {dtype}, round", turns.take, BOUNDS, share=share, most=repeats)
        return found, right


@dataclass(frozen=True)
class Turns:
    """The engines that take turns; prefill is measured in the long form only."""

    sides: Mapping[str, tuple[Server, list[str]]]
    is_long: bool

    def take(self, repeat: int) -> dict[str, float]:
        """Return each ratio and each side's tokens a second, in the other order every other time."""
        found = {
            side: speeds(*self.sides[side], 1000 * (repeat + 1) + 10 * number + 1, self.is_long)
            for number, side in enumerate(record.in_turn(self.sides, repeat))
        }
        ratios = {
            figure: found[ours][kind] / found[theirs][kind]
            for figure, (kind, ours, theirs) in RATIOS.items()
            if ours in found and kind in found.get(theirs, ())
        }
        return ratios | {f"{kind}_tok_s_{side}": one[kind] for side, one in found.items() for kind in one}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=[*BASES, *PACKAGED], action="append")
    parser.add_argument("--repeats", type=int, help="rounds, at most")
    arguments = parser.parse_args()
    run = Run("decode", arguments.long)
    figures, correct = record.Figures(), True
    bases = arguments.base or (BASES if run.is_long else BASES[:1])
    parts = [
        (base, prefix, how)
        for base in bases
        for prefix, how in VARIANTS.get(base, PLAIN).items()
        if run.is_long or not prefix
    ]
    for number, (base, prefix, (dtype, threads)) in enumerate(parts):
        if run.is_interrupted:
            break
        with run.preparing(), tempfile.TemporaryDirectory(prefix="graftwork-decode-") as root:
            built = make_base(base, arguments.params, Path(root))
            share = 1 / (len(parts) - number)
            found, right = measure(run, built, dtype, threads, arguments.repeats, Path(root), share)
            figures.add_pairs({f"{prefix}{name}": values for name, values in found.items()}, f".{base}")
            correct &= right
    record.report(run, figures, BOUNDS, correct, arguments.out)


if __name__ == "__main__":
    start(main)
