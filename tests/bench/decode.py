"""Decode with many adapters: our engine against one without LoRA, and against stock vLLM's LoRA.

    graftwork bench decode [--base tiny-dense --base tiny-moe --base wide-moe] [--repeats 5]
                           [--threads 2] [--dtype float32]

64 requests at once, each with an adapter of its own on every target, rank 8. Decode is what 128 more
tokens a request cost, so prompts and connections drop out; prefill is what prompts of 96 tokens cost. All
engines are up at once and take turns; each repeat has prompts of its own, so that no cache helps.
`share_of_base`: ours over an engine without LoRA. `over_stock`: ours over stock vLLM with the same adapters
(which has none for experts on a CPU). Thread binding is the default's: all cores but one, or `--threads`.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import _record as record
import torch
from live import RunningEngine, StockServer, start_engine, stop_engine
from made_adapters import write
from parity import ask, weight_of

from engine.base.families import BaseShapes
from engine.base.recipes import RECIPES

BATCH, RANK = 64, 8
PROMPT, SHORT, LONG = 16, 4, 132
PREFILL = 96
TARGETS = {
    "tiny-dense": {"share_of_base": ">= 0.6", "over_stock": ">= 1.5"},
    "tiny-moe": {"share_of_base": ">= 0.6"},
    "wide-moe": {"share_of_base": ">= 0.6"},
}
# A bfloat16 answer is this near to float32's reference, and far from it under another adapter.
NEAR = 0.1
Server = RunningEngine | StockServer


def make_base(name: str, root: Path) -> Path:
    """Build a base of the recipe's shape, trained for seconds only: speed does not depend on its weights."""
    from engine.base.build import build

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


def seconds(server: Server, names: list[str], seed: int, length: int, tokens: int) -> float:
    requests = list(zip(names, prompts(seed, length), strict=True))
    started = time.perf_counter()
    asyncio.run(ask(server, requests, tokens))
    return time.perf_counter() - started


def speeds(server: Server, names: list[str], seed: int) -> dict[str, float]:
    """Return tokens a second of decode and of prefill."""
    short, long = (seconds(server, names, seed + i, PROMPT, n) for i, n in enumerate((SHORT, LONG)))
    prefill = seconds(server, names, seed + 2, PREFILL, 1)
    return {"decode": BATCH * (LONG - SHORT) / (long - short), "prefill": BATCH * PREFILL / prefill}


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


def measure(base_name: str, arguments: argparse.Namespace, root: Path) -> tuple[dict, bool]:
    """Return each engine's speeds of each repeat, and whether our answers are right."""
    base = make_base(base_name, root)
    shapes = BaseShapes.read(base)
    dtype = getattr(torch, arguments.dtype)
    made = adapters(shapes, dtype)
    how = {"dtype": arguments.dtype, "max_model_len": 256, "threads": arguments.threads}
    with ExitStack() as stack:
        engine = start_engine(
            base, root / "state", wait_s=600, slots=BATCH, max_num_seqs=BATCH, dtype=arguments.dtype,
            threads=arguments.threads,
        )  # fmt: skip
        stack.callback(stop_engine, engine)
        names = [engine.publish("decode", tensors, RANK, dtype) for tensors in made]
        servers: dict[str, tuple[Server, list[str]]] = {"ours": (engine, names)}
        servers["ours_base"] = (engine, [engine.base_name] * BATCH)
        servers["base"] = (stack.enter_context(StockServer(base, **how)), ["stock"] * BATCH)
        if not shapes.experts:
            stock = stock_with_adapters(base, shapes, made, root, **how)
            servers["stock"] = (stack.enter_context(stock), [f"a{i}" for i in range(BATCH)])
        correct = is_right(engine, names, made)
        runs: dict[str, list[dict[str, float]]] = {key: [] for key in servers}
        for repeat in range(arguments.repeats + 1):
            for number, (key, server) in enumerate(servers.items()):
                found = speeds(*server, 1000 * repeat + 10 * number + 1)
                # The first round warms up: files, caches, allocators.
                if repeat:
                    runs[key].append(found)
    return runs, correct


def run(base_name: str, arguments: argparse.Namespace, root: Path) -> None:
    runs, correct = measure(base_name, arguments, root)
    ratios = {}
    for figure, over, kind in (
        ("share_of_base", "base", "decode"),
        ("over_stock", "stock", "decode"),
        ("prefill_share_of_base", "base", "prefill"),
        ("prefill_over_stock", "stock", "prefill"),
    ):
        if over in runs:
            pairs = zip(runs["ours"], runs[over], strict=True)
            ratios[figure] = [ours[kind] / other[kind] for ours, other in pairs]
    alone = zip(runs["ours_base"], runs["base"], strict=True)
    ratios["base_rows_share_of_base"] = [ours["decode"] / other["decode"] for ours, other in alone]
    rates = {
        f"{kind}_tok_s_{key}": [one[kind] for one in found]
        for key, found in runs.items()
        for kind in ("decode", "prefill")
    }
    every = ratios | rates
    figures = {key: record.median(values) for key, values in every.items()}
    spreads = {key: record.spread(values) for key, values in every.items()}
    # The targets are those of bfloat16 on the default's threads.
    meant = arguments.dtype == "bfloat16" and not arguments.threads
    name = f"decode-{base_name}" + ("" if meant else f"-{arguments.dtype}-{arguments.threads or 'default'}")
    record.report(name, figures, TARGETS[base_name] if meant else {}, spreads, correct, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", choices=list(TARGETS), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: every core but one")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--params", help="taken from `graftwork bench`; this one has a state directory of its own"
    )
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    arguments = parser.parse_args()
    for base in arguments.base or list(TARGETS):
        with tempfile.TemporaryDirectory(prefix="graftwork-decode-") as root:
            run(base, arguments, Path(root))


if __name__ == "__main__":
    main()
