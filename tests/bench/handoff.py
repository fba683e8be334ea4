"""Adapter-only handoff against merged checkpoints, by the four definitions of docs/benchmarks/handoff.md.

    graftwork bench handoff [--base tiny-dense|tiny-moe|wide-moe|qwen3-0.6b] [--repeats 5]

From an adapter in memory to tokens out. Adapter path: pack, append to the store, commit the row,
ask the live engine. Merged path: add the adapter to the base's weights, write a checkpoint, start
a stock server on it. Reload path: the same checkpoint, loaded in place by a live stock server.
Every path starts from the same tensors and a base in the page cache.
"""

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import _record as record
import httpx
import torch
from _shapes import QWEN3_06B, QWEN3_4B, SHAPES, shaped_base
from live import RunningEngine, StockServer, start_engine, stop_engine
from safetensors.torch import load_file, save_file

from engine.base.families import BaseShapes

LENGTHS = (1, 64, 305)
TARGETS = {
    "tiny-dense": {"ratio_first_token": ">= 30.7", "ratio_64": ">= 18.3"},
    "tiny-moe": {"ratio_first_token": ">= 3.41", "ratio_305": ">= 10"},
    "wide-moe": {},
    "qwen3-0.6b": {},
}
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
RANK = 8


def dense_share(config: dict) -> float:
    sizes = BaseShapes.of({"model_type": "qwen3", **config}).modules().values()
    adapter = sum(inputs + outputs for inputs, outputs in sizes)
    base = config["vocab_size"] * config["hidden_size"]
    base += sum(inputs * outputs for inputs, outputs in sizes)
    return adapter / base


def moe_share(
    layers: int, experts: int, hidden: int, inner: int, attention: list[tuple[int, int]], rest: int
) -> float:
    """`attention` lists (in, out) of a layer's projections; `rest` counts parameters without LoRA."""
    per_layer = attention + [(hidden, inner)] * (2 * experts) + [(inner, hidden)] * experts
    adapter = layers * sum(i + o for i, o in per_layer)
    return adapter / (layers * sum(i * o for i, o in per_layer) + rest)


def adapter_shares() -> dict[str, float]:
    """Rank-1 adapter bytes / base bytes at equal precision, from the published configurations."""
    qwen_moe = moe_share(
        48, 128, 2048, 768, [(2048, 4096), (2048, 512), (2048, 512), (4096, 2048)], 2 * 151936 * 2048
    )
    # Kimi-K2: 61 layers, 384 routed and 1 shared expert, MLA with q_lora_rank 1536 and kv_lora_rank 512.
    kimi = moe_share(
        61, 385, 7168, 2048,
        [(7168, 1536), (1536, 64 * 192), (7168, 576), (512, 64 * 256), (64 * 128, 7168)],
        2 * 163840 * 7168,
    )  # fmt: skip
    shares = {
        "qwen3-0.6b": dense_share(QWEN3_06B),
        "qwen3-4b": dense_share(QWEN3_4B),
        "qwen3-30b-a3b": qwen_moe,
        "kimi-k2": kimi,
    }
    return {"adapter_share_of_base": max(shares.values())} | {
        f"adapter_share_of_base.{name}": share for name, share in shares.items()
    }


def make_base(name: str, root: Path) -> tuple[Path, str]:
    """Build the base once; return its directory and serving dtype."""
    from engine.base.build import build
    from engine.base.recipes import RECIPES

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


def adapter_path(engine: RunningEngine, shapes, seeds: list[int], dtype: torch.dtype) -> dict[str, float]:
    """One fresh adapter for each length, so that every sample is cold."""
    times: dict[str, float] = {}
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
            times[f"total_{length}"] = time.perf_counter() - started
    return times


def merged_path(base: Path, tensors: dict, scratch: Path, dtype: str) -> tuple[dict[str, float], list[int]]:
    started = time.perf_counter()
    write_merged(base, tensors, scratch)
    with StockServer(scratch, dtype) as server:
        load = time.perf_counter() - started
        times = {"total_0": load}
        for length in LENGTHS:
            seconds, ids = sample(server.client, "stock", length)
            times[f"total_{length}"] = load + seconds
    return times, ids


def reload_path(server: StockServer, base: Path, tensors: dict, scratch: Path) -> tuple[float, list[int]]:
    started = time.perf_counter()
    write_merged(base, tensors, scratch)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(scratch)}}
    server.client.post("/collective_rpc", json=body).raise_for_status()
    _, ids = sample(server.client, "stock", 64)
    return time.perf_counter() - started, ids


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


def run(base_name: str, repeats: int, root: Path, out: Path) -> None:
    from transformers import AutoConfig

    base, dtype_name = make_base(base_name, root)
    dtype = getattr(torch, dtype_name)
    shapes = BaseShapes.of(AutoConfig.from_pretrained(base).to_dict()).modules()
    settings = {"dtype": dtype_name, "max_model_len": 512, "max_num_seqs": 16, "slots": 4}
    engine = start_engine(base, root / "state", wait_s=600, **settings)
    try:
        adapter_path(engine, shapes, [1, 2, 3, 4], dtype)
        adapters = [
            adapter_path(engine, shapes, [10 * i + k for k in range(4)], dtype) for i in range(1, repeats + 1)
        ]
        merged, agreed, wanted = [], [], []
        for i in range(repeats):
            times, ids = merged_path(base, adapter(shapes, 1000 + i), root / "merged", dtype_name)
            merged.append(times)
            wanted.append(ids[:64])
            agreed.append(agreement(engine, shapes, 1000 + i, ids, dtype))
    finally:
        stop_engine(engine)
    with StockServer(base, dtype_name) as server:
        sample(server.client, "stock", 64)
        reloads = [
            reload_path(server, base, adapter(shapes, 1000 + i), root / "merged") for i in range(repeats)
        ]
    pairs = {"ratio_load": 0, "ratio_first_token": 1, "ratio_64": 64, "ratio_305": 305}
    ratios = {
        figure: [m[f"total_{n}"] / a[f"total_{n}"] for m, a in zip(merged, adapters, strict=True)]
        for figure, n in pairs.items()
    }
    ratios["ratio_reload_64"] = [r / a["total_64"] for (r, _), a in zip(reloads, adapters, strict=True)]
    figures = {key: record.median(values) for key, values in ratios.items()}
    figures |= {f"adapter_s_{n}": record.median([a[f"total_{n}"] for a in adapters]) for n in (0, *LENGTHS)}
    figures |= {f"merged_s_{n}": record.median([m[f"total_{n}"] for m in merged]) for n in (0, *LENGTHS)}
    figures["reload_s_64"] = record.median([seconds for seconds, _ in reloads])
    figures["tokens_agreed"] = min(agreed)
    # A reload that did not take would be fast.
    figures["reload_tokens_agreed"] = min(
        agreed_tokens(ids, want) for (_, ids), want in zip(reloads, wanted, strict=True)
    )
    figures |= adapter_shares()
    # In float32 the two paths differ by rounding only; bfloat16 rounds the merged weights themselves.
    correct = min(agreed) >= (64 if dtype == torch.float32 else 1)
    if figures["reload_tokens_agreed"] < 64:
        # Seen on tiny-moe with stock vLLM 0.32.0 on CPU: not one token agrees.
        print("The reloaded engine does not answer as the merged checkpoint: its figures do not count.")
        for key in ("ratio_reload_64", "reload_s_64"):
            del figures[key]
    spreads = {key: record.spread(values) for key, values in ratios.items() if key in figures}
    targets = {**TARGETS[base_name], "adapter_share_of_base": "<= 0.01"}
    record.report(f"handoff-{base_name}", figures, targets, spreads, correct, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", choices=list(TARGETS), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--params", help="taken from `graftwork bench`; this one has a state directory of its own"
    )
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    arguments = parser.parse_args()
    for base in arguments.base or list(TARGETS):
        with tempfile.TemporaryDirectory(prefix="graftwork-handoff-") as root:
            run(base, arguments.repeats, Path(root), arguments.out)


if __name__ == "__main__":
    main()
