"""Adapter-only handoff against merged checkpoints, by the four definitions of docs/benchmarks/handoff.md.

    graftwork bench handoff [--base tiny-dense|tiny-moe|wide-moe|qwen3-0.6b|smollm2-135m] [--repeats N]
                            [--long]

From an adapter in memory to tokens out. Adapter path: pack, append to the store, commit the row,
ask the live engine. Merged path: add the adapter to the base's weights, write a checkpoint, start
a stock server on it. Reload path: the same checkpoint, loaded in place by a live stock server; on dense
bases alone, since stock vLLM 0.32.0 reloads a mixture of experts wrongly on a CPU, its own checkpoint too.
The paths alternate until the ratios are decided. Each starts from the same tensors and a base in the page
cache. `--long` measures every base.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _record as record
import httpx
import torch
from _adapter_shares import adapter_shares
from _run import Run, options, start
from _shapes import SHAPES, shaped_base
from safetensors.torch import load_file, save_file

from engine.base.families import BaseShapes
from engine.base.names import PACKAGED
from engine.base.resident import ensure_base
from engine.base.toys.recipes import RECIPES
from engine.settings.params import BaseConfig, load_params
from tests.helpers.live import RunningEngine, StockServer, start_engine, stop_engine

LENGTHS = (1, 64, 305)
# The longest answer does not fit into the default's 256 tokens.
CONTEXT = 512
BASES = ("tiny-dense", "tiny-moe", "wide-moe", "qwen3-0.6b")
# The paths that take longer than the adapter's, by figure: path, and tokens after which it ends.
RATIOS = {
    "ratio_load": ("merged", 0), "ratio_first_token": ("merged", 1), "ratio_64": ("merged", 64),
    "ratio_305": ("merged", 305), "ratio_reload_64": ("reload", 64),
}  # fmt: skip
BOUNDS = dict.fromkeys([*RATIOS, "tokens_agreed"], record.at_least())
BOUNDS |= {
    **{f"ratio_first_token.{base}": record.at_least(30.7) for base in ("tiny-dense", *PACKAGED)},
    **{f"ratio_64.{base}": record.at_least(18.3) for base in ("tiny-dense", *PACKAGED)},
    "ratio_first_token.tiny-moe": record.at_least(3.41),
    "ratio_305.tiny-moe": record.at_least(10),
    "adapter_share_of_base": record.at_most(0.01),
}
BOUNDS |= {f"{path}_s_{n}": record.at_most() for path in ("adapter", "merged") for n in (0, *LENGTHS)}
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
RANK = 8


def make_base(name: str, params: Path, root: Path) -> tuple[Path, str]:
    """Build the base once; return its directory and serving dtype."""
    from engine.base.toys.build import build

    if name in PACKAGED:
        return ensure_base(BaseConfig(name=name), load_params(params).paths).path, "float32"
    chosen = name if name in RECIPES else "tiny-dense"
    built, recipe = root / chosen, RECIPES[chosen]
    built.mkdir()
    recipe = replace(recipe, steps=min(20, recipe.steps), problems=2048, context=512)
    build(recipe, 1, built, lambda *_: None)
    if name in RECIPES:
        return built, recipe.dtype
    return shaped_base(SHAPES[name], root / name, built), "bfloat16"


def adapter(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        tensors[f"{name}.lora_A"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        tensors[f"{name}.lora_B"] = torch.randn(outputs, RANK, generator=generator) * 0.05
    return tensors


def write_merged(base: Path, tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Write the whole checkpoint with W + B @ A and fsync it, as the adapter path does."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in base.glob("*.safetensors"):
        weights = load_file(file)
        for key in {key.rpartition(".lora_")[0] for key in tensors}:
            weight = weights[f"{key}.weight"]
            delta = tensors[f"{key}.lora_B"] @ tensors[f"{key}.lora_A"]
            weights[f"{key}.weight"] = (weight.float() + delta).to(weight.dtype)
        save_file(weights, directory / file.name, metadata={"format": "pt"})
        handle = os.open(directory / file.name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def sample(client: httpx.Client, model: str, tokens: int) -> tuple[float, list[int]]:
    """Greedy tokens from a fixed prompt; returns seconds and token ids."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    started = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    return time.perf_counter() - started, response.json()["choices"][0]["token_ids"]


def adapter_path(engine: RunningEngine, shapes, seeds: Sequence[int], dtype: torch.dtype) -> dict[int, float]:
    """Return seconds until an adapter is ready (0) and until so many tokens are out: a fresh one for each."""
    times: dict[int, float] = {}
    with engine.client() as client:
        for length, seed in zip((0, *LENGTHS), seeds, strict=True):
            tensors = adapter(shapes, seed)
            started = time.perf_counter()
            name = engine.publish("handoff", tensors, RANK, dtype)
            if length:
                sample(client, name, length)
            else:
                client.post("/v1/prewarm", json={"model": name}).raise_for_status()
                while name not in client.get("/graftwork/residency").json()["adapters"]:
                    time.sleep(0.001)
            times[length] = time.perf_counter() - started
    return times


def merged_path(base: Path, tensors: dict, scratch: Path, dtype: str) -> tuple[dict[int, float], list[int]]:
    """Return seconds until the server is ready (0) and until so many tokens are out, and the tokens."""
    started = time.perf_counter()
    write_merged(base, tensors, scratch)
    with StockServer(scratch, dtype, CONTEXT) as server:
        load = time.perf_counter() - started
        times = {0: load}
        for length in LENGTHS:
            seconds, ids = sample(server.client, "stock", length)
            times[length] = load + seconds
    return times, ids


def reload_path(
    server: StockServer, base: Path, tensors: dict, scratch: Path
) -> tuple[dict[int, float], list[int]]:
    """Return the seconds until 64 tokens are out, and the tokens."""
    started = time.perf_counter()
    write_merged(base, tensors, scratch)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(scratch)}}
    server.client.post("/collective_rpc", json=body).raise_for_status()
    _, ids = sample(server.client, "stock", 64)
    return {64: time.perf_counter() - started}, ids


def agreed_tokens(left: list[int], right: list[int]) -> int:
    """Return after how many greedy tokens two answers part."""
    pairs = zip(left, right, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))


def agreement(engine: RunningEngine, shapes, seed: int, merged_ids: list[int], dtype: torch.dtype) -> int:
    """Return how many greedy tokens the two paths agree on before they part."""
    name = engine.publish("handoff", adapter(shapes, seed), RANK, dtype)
    with engine.client() as client:
        _, ids = sample(client, name, LENGTHS[-1])
    return agreed_tokens(ids, merged_ids)


@dataclass(frozen=True)
class Round:
    """Seconds by path and tokens, and after how many tokens the first answer parts from the merged path's."""

    seconds: dict[str, dict[int, float]]
    agreed: int

    def ratio(self, figure: str) -> float:
        """Return how much longer a figure's path takes than the adapter's."""
        path, tokens = RATIOS[figure]
        return self.seconds[path][tokens] / self.seconds["adapter"][tokens]


@dataclass(frozen=True)
class Bench:
    """The live servers on one base: our engine, and on a dense one a stock server to reload."""

    engine: RunningEngine
    stock: StockServer | None
    root: Path
    dtype: str
    shapes: dict[str, tuple[int, int]]

    def round(self, number: int) -> Round:
        """Take every path with adapters of its own, in the other order every other time."""
        base, torch_dtype = self.engine.base_path, getattr(torch, self.dtype)
        tensors = adapter(self.shapes, 1000 + number)
        paths: dict[str, Callable[[], Any]] = {
            "adapter": lambda: (adapter_path(self.engine, self.shapes, seeds(number), torch_dtype), []),
            "merged": lambda: merged_path(base, tensors, self.root / "merged", self.dtype),
        }
        if stock := self.stock:
            paths["reload"] = lambda: reload_path(stock, base, tensors, self.root / "reloaded")
        found = {name: paths[name]() for name in record.in_turn(paths, number)}
        wanted = found["merged"][1]
        agreed = agreement(self.engine, self.shapes, 1000 + number, wanted, torch_dtype)
        if "reload" in found and (parted := agreed_tokens(found["reload"][1], wanted[:64])) < 64:
            agreed = min(agreed, parted)
        return Round({name: times for name, (times, _) in found.items()}, agreed)


def seeds(number: int) -> range:
    """Return the seeds of a round's adapters: one for the load, and one for each length."""
    each = 1 + len(LENGTHS)
    return range(each * (number + 1), each * (number + 2))


def measure(
    run: Run, base_name: str, given: argparse.Namespace, root: Path, share: float
) -> tuple[dict[str, list[float]], bool]:
    """Return each figure of a base with its repeats, and whether adapter and merged checkpoint agree."""
    base, dtype = make_base(base_name, given.params, root)
    shapes = BaseShapes.read(base).modules()
    agreed: list[int] = []
    with ExitStack() as stack:
        engine = start_engine(base, root / "state", wait_s=600, dtype=dtype, max_model_len=CONTEXT)
        stack.callback(stop_engine, engine)
        adapter_path(engine, shapes, seeds(-1), getattr(torch, dtype))
        stock = None
        if not BaseShapes.read(base).experts:
            stock = stack.enter_context(StockServer(base, dtype, CONTEXT))
            sample(stock.client, "stock", 64)
        bench = Bench(engine, stock, root, dtype, shapes)

        def take(number: int) -> dict[str, float]:
            one = bench.round(number)
            agreed.append(one.agreed)
            return figures_of(one)

        bounds = {name.removesuffix(f".{base_name}"): bound for name, bound in BOUNDS.items()}
        found = run.pairs(f"{base_name}, round", take, bounds, share=share, most=given.repeats)
    # In float32 the two paths differ by rounding only; bfloat16 rounds the merged weights themselves.
    return found, min(agreed, default=0) >= (64 if dtype == "float32" else 1)


def figures_of(one: Round) -> dict[str, float]:
    """Return a round's figures."""
    found = {figure: one.ratio(figure) for figure, (path, _) in RATIOS.items() if path in one.seconds}
    for path, times in one.seconds.items():
        found |= {f"{path}_s_{n}": seconds for n, seconds in times.items()}
    return found | {"tokens_agreed": float(one.agreed)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=[*BASES, *PACKAGED], action="append")
    parser.add_argument("--repeats", type=int, help="rounds, at most")
    arguments = parser.parse_args()
    run = Run("handoff", arguments.long)
    figures, correct = record.Figures(adapter_shares()), True
    bases = arguments.base or (BASES if run.is_long else BASES[:1])
    for number, base in enumerate(bases):
        if run.is_interrupted:
            break
        with run.preparing(), tempfile.TemporaryDirectory(prefix="graftwork-handoff-") as root:
            found, right = measure(run, base, arguments, Path(root), 1 / (len(bases) - number))
            figures.add_pairs(found, f".{base}")
            correct &= right
    record.report(run, figures, BOUNDS, correct, arguments.out)


if __name__ == "__main__":
    start(main)
