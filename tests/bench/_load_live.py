"""Loads in a live engine on `many-moe` (48 layers of 128 experts, an eighth of the width)."""

import os
import time
from pathlib import Path

import torch

from engine.base.families import BaseShapes
from engine.base.toys.build import build
from engine.base.toys.recipes import RECIPES
from tests.helpers.live import RunningEngine, start_engine, stop_engine

DTYPE = torch.bfloat16
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


def adapter(shapes: BaseShapes, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {}
    for name, (inputs, outputs) in shapes.modules().items():
        found[f"{name}.lora_A"] = (torch.randn(1, inputs) / inputs**0.5).to(DTYPE)
        found[f"{name}.lora_B"] = (torch.randn(outputs, 1) * 0.05).to(DTYPE)
    return found


def first_token(client, model: str) -> float:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - started


def loads(engine: RunningEngine, shapes: BaseShapes, count: int) -> tuple[dict[str, list[float]], bool]:
    """Load one after another: seconds of a step's copies, and to the first token, cold and warm."""
    found: dict[str, list[float]] = {"live_activate_s": [], "live_cold_s": [], "live_warm_s": []}
    names = [engine.publish("live", adapter(shapes, seed), 1, DTYPE) for seed in range(count + 2)]
    with engine.client() as client:
        for name in names:
            cold = first_token(client, name)
            ranks = client.get("/graftwork/loads").json()
            found["live_cold_s"].append(cold)
            found["live_activate_s"].append(max(rank["activate_seconds"] for rank in ranks))
            found["live_warm_s"].append(first_token(client, name))
    length = engine.catalog.revisions.get("live", names[0].partition("@")[2]).length
    shares = [rank["activated_bytes"] / rank["activations"] / length for rank in ranks]
    found["live_share_of_bytes"] = [max(shares)]
    verified = [rank["verified_bytes"] for rank in ranks]
    right = verified[0] == length * len(names) and not any(verified[1:])
    return {key: values[2:] or values for key, values in found.items()}, right


def live(root: Path, count: int, ranks: int) -> tuple[dict[str, list[float]], bool]:
    """Return the figures of an engine on so many tensor-parallel ranks, and whether each read its share."""
    from transformers import AutoConfig

    base = root / "many-moe"
    if not base.is_dir():
        base.mkdir()
        build(RECIPES["many-moe"], 1, base, lambda *_: None)
    shapes = BaseShapes.of(AutoConfig.from_pretrained(base).to_dict())
    settings = {"dtype": "bfloat16", "max_rank": 1, "slots": 2, "max_num_seqs": 8, "tensor_parallel": ranks}
    engine = start_engine(base, root / f"live-{ranks}", wait_s=600, **settings)
    try:
        found, right = loads(engine, shapes, count)
    finally:
        stop_engine(engine)
    tail = "" if ranks == 1 else f".tp{ranks}"
    return {f"{key}{tail}": values for key, values in found.items()}, right


def rank_counts() -> list[int]:
    return [1, 2] if len(os.sched_getaffinity(0)) > 1 else [1]
