"""Router replay: how often engine and trainer choose other experts, and what it does to importance ratios.

    graftwork bench replay [--base tiny-moe] [--problems 64] [--size 0.1]

A live engine in float32 and then in bfloat16 samples with the base and with random adapters of the given
size, and tells the experts of every token. The trainer scores the same tokens by its own choice and by the
engine's, in float32, and in the engine's bfloat16. A token is out of route when the trainer's own choice
differs in any layer. `asked_seconds_ratio` is a sampling with ids over one without, side by side.
"""

import argparse
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path

import _record as record
import torch

from engine.base.families import BaseShapes
from engine.base.prompts import prompt_ids
from engine.base.resident import ensure_base
from engine.problems.procedural import TASKS, stream
from engine.settings.params import BaseConfig, load_params
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import TokenRow
from engine.training.model.replay import decode
from engine.training.rollouts import Sampling, sample_groups
from tests.helpers.live import RunningEngine, start_engine, stop_engine
from tests.helpers.parity import RANK, random_adapter

ENGINES = {"float32": ("float32",), "bfloat16": ("float32", "bfloat16")}
ADAPTERS = 3
MEANS = [f"engine float32, trainer float32, {way}: ratio_mean" for way in ("alone", "replay")]
BOUNDS = dict.fromkeys(MEANS, record.within(1, 1e-3))
Drawn = tuple[list[TokenRow], torch.Tensor]


def asked(base: Path, problems: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    each = [islice(stream(task, "train", 1), problems // len(TASKS)) for task in TASKS]
    return [prompt_ids(tokenizer, problem.question) for part in each for _, problem in part]


def draw(engine: RunningEngine, model: str, prompts: list[list[int]]) -> tuple[Drawn, float]:
    """Return rows with the engine's experts, its log-probabilities, and seconds with ids over without."""
    seconds = []
    for ids in (False, True, False, True):
        sampling = Sampling(group_size=8, max_tokens=24, seed=1, routed_experts=ids)
        clock = time.monotonic()
        groups = sample_groups(engine.url, engine.key, model, prompts, sampling)
        seconds.append(time.monotonic() - clock)
    samples = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    rows = [TokenRow((*p, *s.tokens), len(p), decode(s.routed_experts or "")) for p, s in samples]
    old = torch.tensor([value for _, sample in samples for value in sample.logprobs])
    return (rows, old), (seconds[1] + seconds[3]) / (seconds[0] + seconds[2])


def compare(
    trainer: ResidentBase, drawn: list[tuple[dict | None, Drawn]], follows: bool
) -> tuple[dict[str, float], torch.Tensor]:
    """Return the figures of all tokens, and each token's logarithm of trainer over engine."""
    ratios, strayed, known = [], 0, 0
    trainer.replay.follows = follows
    for tensors, (rows, old) in drawn:
        adapter = trainer.hold(tensors) if tensors else None
        new = torch.tensor([value for row in trainer.score(adapter, rows) for value in row])
        counted = trainer.replay.take()
        strayed, known = strayed + counted[0], known + counted[1]
        ratios.append(new - old)
    gap = torch.cat(ratios)
    ratio = gap.exp()
    figures = {
        "out_of_route": strayed / known,
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "log_ratio_mean_size": float(gap.abs().mean()),
    }
    return figures, gap


def moved(alone: torch.Tensor, replay: torch.Tensor) -> dict[str, float]:
    """Return what replay did to the tokens that it changed at all: their mean sizes of log ratios."""
    changed = (alone - replay).abs() > 1e-6
    sizes = {"alone": alone[changed].abs(), "replay": replay[changed].abs()}
    means = {f"changed tokens, {name}: log_ratio_mean_size": float(v.mean()) for name, v in sizes.items()}
    return {"changed tokens": float(changed.float().mean()), **(means if changed.any() else {})}


def measure(path: Path, dtype: str, problems: int, size: float, folder: Path) -> dict[str, float]:
    modules, prompts = BaseShapes.read(path).modules(), asked(path, problems)
    torch_dtype = getattr(torch, dtype)
    adapters = [random_adapter(modules, seed, size=size) for seed in range(ADAPTERS)]
    # Rounded once, so that both sides hold the same adapter.
    rounded = [{key: value.to(torch_dtype) for key, value in tensors.items()} for tensors in adapters]
    engine = start_engine(path, folder / dtype, wait_s=600, slots=4, dtype=dtype, routed_experts=True)
    try:
        names = [engine.publish("bench", tensors, RANK, torch_dtype) for tensors in rounded]
        pairs = [draw(engine, name, prompts) for name in (*names, engine.base_name)]
    finally:
        stop_engine(engine)
    held = [{key: value.float() for key, value in tensors.items()} for tensors in rounded]
    drawn = list(zip((*held, None), (rows for rows, _ in pairs), strict=True))
    figures = {f"engine {dtype}: tokens": float(sum(len(old) for _, (_, old) in drawn))}
    for trained in ENGINES[dtype]:
        trainer = ResidentBase(path, 1, 4096, dtype=getattr(torch, trained))
        both, pair = {}, f"engine {dtype}, trainer {trained}"
        for follows, name in ((False, "alone"), (True, "replay")):
            found, both[name] = compare(trainer, drawn, follows)
            figures |= {f"{pair}, {name}: {key}": value for key, value in found.items()}
        figures |= {f"{pair}, {key}": value for key, value in moved(**both).items()}
    figures[f"engine {dtype}: asked_seconds_ratio"] = record.median([ratio for _, ratio in pairs])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="tiny-moe")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--size", type=float, default=0.1, help="standard deviation of the adapters' B")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="whose built bases are used")
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    found = ensure_base(BaseConfig(name=given.base), load_params(given.params).paths)
    folder = Path(tempfile.mkdtemp())
    figures: dict[str, float] = {}
    try:
        for dtype in ENGINES:
            figures |= measure(found.path, dtype, given.problems, given.size, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    correct = all(bound.holds(figures[name]) for name, bound in BOUNDS.items())
    figures = {f"{name}.{given.base}": value for name, value in figures.items()}
    record.report("replay", figures, BOUNDS, {}, correct, given.out)


if __name__ == "__main__":
    main()
