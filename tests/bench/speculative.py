"""Rollouts with drafted tokens against rollouts without: `engine.speculative`, vLLM's n-gram lookup.

On a GPU alone: on a CPU the engine refuses the setting; then its reason is printed and nothing is measured.

    graftwork bench speculative [--base tiny-dense|tiny-moe] [--drafts 4] [--repeats 5]

Two engines, alike but for the setting, answer in turns: groups of 8 samples for the problems of each task,
at temperature 1 and with one adapter. `speed_TASK`: tokens a second with drafts / without; `cpu_TASK`: the
same of CPU seconds a token. `accepted_TASK`: share of drafted tokens that were kept. `nats_TASK`: a sample's
mean negative log-probability with drafts minus without, zero but for chance when sampling is right.
Check: the same greedy tokens with and without, and log-probabilities within `TOLERANCE`.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean

import _record as record
import psutil

from engine.base.families import BaseShapes
from engine.base.prompts import prompt_ids
from engine.base.resident import ensure_base
from engine.errors import ConfigError
from engine.planning.gpu import cuda_bytes
from engine.problems.procedural import TASKS, stream
from engine.serving.server import speculative_arguments
from engine.settings.params import BaseConfig, load_params
from engine.settings.services import EngineConfig
from engine.training.rollouts import Sampling, sample_groups
from tests.helpers.live import RunningEngine, start_engine, stop_engine
from tests.helpers.parity import ask, random_adapter

GROUPS, GROUP_SIZE, TOKENS = 16, 8, 24
BOUNDS = {f"speed_{task}": record.at_least() for task in TASKS}
# Log-probabilities of one engine in batches of another size.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Round:
    """One round of rollouts: tokens, seconds, CPU seconds of the engine, and nats a sample."""

    tokens: int
    seconds: float
    cpu: float
    nats: float


def cpu_seconds(engine: RunningEngine) -> float:
    root = psutil.Process(engine.process.pid)
    return sum(sum(p.cpu_times()[:2]) for p in (root, *root.children(recursive=True)))


def counted(engine: RunningEngine, what: str) -> float:
    with engine.client() as client:
        lines = client.get("/metrics").text.splitlines()
    name = f"vllm:spec_decode_num_{what}_tokens_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def rollouts(engine: RunningEngine, model: str, prompts: list[list[int]], seed: int) -> Round:
    sampling = Sampling(GROUP_SIZE, TOKENS, seed=seed)
    clock, cpu = time.monotonic(), cpu_seconds(engine)
    groups = sample_groups(engine.url, engine.key, model, prompts, sampling)
    seconds, cpu = time.monotonic() - clock, cpu_seconds(engine) - cpu
    samples = [sample for group in groups for sample in group]
    nats = mean(-sum(sample.logprobs) for sample in samples)
    return Round(sum(len(sample.tokens) for sample in samples), seconds, cpu, nats)


def agree(plain: RunningEngine, drafting: RunningEngine, models: list[str], prompts: list[list[int]]) -> bool:
    """Say whether both answer greedily with the same tokens at the same log-probabilities."""
    requests = [(model, prompt) for model in models for prompt in prompts]
    left, right = (asyncio.run(ask(engine, requests, 48)) for engine in (plain, drafting))
    pairs = [(a["logprobs"], b["logprobs"]) for a, b in zip(left, right, strict=True)]
    near = all(abs(x - y) < TOLERANCE for a, b in pairs for x, y in zip(a, b, strict=True))
    return near and [a["ids"] for a in left] == [b["ids"] for b in right]


def measure(
    base: Path, engines: dict[str, RunningEngine], repeats: int
) -> tuple[dict[str, list[float]], bool]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    shapes = BaseShapes.of(json.loads((base / "config.json").read_text())).modules()
    tensors = random_adapter(shapes, 1, size=0.02)
    names = {name: engine.publish("drafts", tensors, 8) for name, engine in engines.items()}
    plain, drafting = engines["plain"], engines["drafting"]
    found: dict[str, list[float]] = {}
    right = True
    for task in TASKS:
        prompts = [prompt_ids(tokenizer, p.question) for _, p in islice(stream(task, "eval", 3), GROUPS)]
        right = right and agree(plain, drafting, [plain.base_name, names["plain"]], prompts)
        drafted, accepted = counted(drafting, "draft"), counted(drafting, "accepted")
        for seed in range(repeats + 1):
            order = record.in_turn(engines, seed)
            each = {name: rollouts(engines[name], names[name], prompts, 1000 * seed) for name in order}
            without, with_ = each["plain"], each["drafting"]
            if seed == 0:
                # Warms both up.
                continue
            ratio = (with_.tokens / with_.seconds) / (without.tokens / without.seconds)
            found.setdefault(f"speed_{task}", []).append(ratio)
            cpu = (with_.cpu / with_.tokens) / (without.cpu / without.tokens)
            found.setdefault(f"cpu_{task}", []).append(cpu)
            found.setdefault(f"nats_{task}", []).append(with_.nats - without.nats)
        drafted, accepted = counted(drafting, "draft") - drafted, counted(drafting, "accepted") - accepted
        found[f"drafted_{task}"] = [drafted]
        found[f"accepted_{task}"] = [accepted / max(1, drafted)]
    return found, right


def refusal(drafts: int) -> str | None:
    """Return why the engine does not draft on this machine, in its own words; None where it does."""
    if cuda_bytes() is not None:
        return None
    try:
        speculative_arguments(EngineConfig(speculative=drafts), None)
    except ConfigError as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="tiny-dense")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    if reason := refusal(given.drafts):
        print(f"bench speculative: nothing to measure here. {reason}")
        return
    base = ensure_base(BaseConfig(name=given.base), load_params(given.params).paths).path
    engines: dict[str, RunningEngine] = {}
    with tempfile.TemporaryDirectory(prefix="graftwork-speculative-") as root:
        try:
            for name, drafts in (("plain", 0), ("drafting", given.drafts)):
                engines[name] = start_engine(base, Path(root) / name, wait_s=600, speculative=drafts)
            found, right = measure(base, engines, given.repeats)
        finally:
            for engine in engines.values():
                stop_engine(engine)
    figures = record.Figures()
    figures.add(found, f".{given.base}")
    record.report("speculative", figures.values, BOUNDS, figures.spreads, right, given.out)


if __name__ == "__main__":
    main()
