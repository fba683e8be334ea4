"""What the effect probe's tolerance lets through: errors of a right adapter, and of faults made smaller.

    graftwork bench probe [--base tiny-dense] [--dtype float32|bfloat16] [--seeds 3] [--first-seed 0]

A live engine serves right adapters of three sizes, and the same with a fault: missing, doubled, of another
revision, parts exchanged, or B scaled by 1 - fault: all, one projection's, or that in one layer. The probe is
our trainer's, of the right adapter and in the engine's dtype. Each figure says which share was refused.
"""

import argparse
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import _record as record
import torch

from engine.adapters.revision import make_manifest, write_revision
from engine.base.families import BaseShapes
from engine.base.resident import ensure_base
from engine.quality.probe import TOLERANCE, Probe, ProbeResult, check
from engine.settings.params import BaseConfig, Params, load_params
from engine.training.loop import PROBE_PROMPTS, PROBE_TOKENS
from engine.training.model.lora import ResidentBase
from engine.training.service.export import Exporter
from engine.training.service.protocol import ProbeRevision
from engine.verification.fault_localization import place
from tests.helpers.live import RunningEngine, start_engine, stop_engine
from tests.helpers.parity import RANK, prompts, random_adapter

FAULTS = (1.0, 0.5, 0.3, 0.1, 0.03, 0.01)
SIZES = (0.02, 0.05, 0.15)
PAIRS = (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("layers.0", "layers.1"), ("experts.0", "experts.1"))
# Noise on every weight, in standard deviations of its matrix.
OTHER_BASE = 0.1
ERRORS = (
    "base_error_nats",
    "right_error_nats",
    "right_error_of_one_token_nats",
    "right_error_over_tolerance",
)
BOUNDS = dict.fromkeys(ERRORS, record.at_most()) | {"right_accepted": record.at_least(1)}


def probe_of(engine: RunningEngine, base: ResidentBase, tensors: dict, folder: Path) -> Probe:
    targets = tuple(sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}))
    manifest = make_manifest(
        tensors, policy="bench", base_digest=engine.base_digest, rank=RANK, targets=targets, step=0
    )
    directory = write_revision(folder / manifest.digest, tensors, manifest, {})
    request = ProbeRevision(
        request_id=uuid.uuid4().hex, policy="bench", digest=manifest.digest, directory=str(directory),
        prompts=prompts(PROBE_PROMPTS), tokens=PROBE_TOKENS,
    )  # fmt: skip
    dtype = next(iter(tensors.values())).dtype
    exporter = Exporter(Params(state_dir=engine.state), engine.catalog, dtype, ())
    return exporter.probe_revision(base, engine.base_digest, request)


def served(engine: RunningEngine, tensors: dict, probe: Probe) -> ProbeResult:
    name = engine.publish("bench", tensors, RANK, next(iter(tensors.values())).dtype)
    return check(engine.url, engine.key, name, engine.base_name, probe)


def scaled(tensors: dict, factor: float, is_in: Callable[[str, int], bool]) -> dict:
    """Scale the B of the places (projection, layer) that `is_in` says."""
    return {
        key: tensor * factor if key.endswith("B") and is_in(*place(key)) else tensor
        for key, tensor in tensors.items()
    }


def swapped(tensors: dict, left: str, right: str) -> dict | None:
    """Exchange two parts of the names; None where shapes do not allow it or nothing changes."""
    pair, other = re.compile(rf"\b({re.escape(left)}|{re.escape(right)})\b"), {left: right, right: left}
    names = {key: pair.sub(lambda found: other[found[0]], key) for key in tensors}
    fits = all(name in tensors and tensors[name].shape == tensors[key].shape for key, name in names.items())
    changed = any(name != key for key, name in names.items())
    return {names[key]: tensor for key, tensor in tensors.items()} if fits and changed else None


def faults(tensors: dict, other: dict) -> Iterator[tuple[str, dict]]:
    """Yield every fault's name and the adapter with it."""
    places = sorted({place(key) for key in tensors})
    yield "doubled", scaled(tensors, 2.0, lambda *_: True)
    yield "another revision", other
    for left, right in PAIRS:
        if wrong := swapped(tensors, left, right):
            yield f"{left} and {right} exchanged", wrong
    for fault in FAULTS:
        yield f"every B less {fault:.0%}", scaled(tensors, 1 - fault, lambda *_: True)
        for projection, first in dict(reversed(places)).items():
            in_all = scaled(tensors, 1 - fault, lambda name, _, it=projection: name == it)
            yield f"one projection's B less {fault:.0%}", in_all
            one = scaled(tensors, 1 - fault, lambda *at, it=(projection, first): at == it)
            yield f"one projection's B less {fault:.0%} in one layer", one


def another(path: Path, dtype: torch.dtype) -> ResidentBase:
    """Return the base with noise on every weight."""
    base, generator = ResidentBase(path, 1, 2048, dtype=dtype), torch.Generator().manual_seed(3)
    for weight in base.model.parameters():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * OTHER_BASE
        weight.data += noise.to(weight.dtype)
    return base


def measure(engine: RunningEngine, dtype: torch.dtype, seeds: range, folder: Path) -> dict:
    modules = BaseShapes.read(engine.base_path).modules()
    base, other_base = ResidentBase(engine.base_path, 1, 2048, dtype=dtype), another(engine.base_path, dtype)
    right: list[ProbeResult] = []
    caught: dict[str, list[ProbeResult]] = {}

    def made(seed: int, size: float) -> dict:
        drawn = random_adapter(modules, seed, size=size)
        return {key: tensor.to(dtype) for key, tensor in drawn.items()}

    for seed in seeds:
        for size in SIZES:
            tensors = made(seed, size)
            probe = probe_of(engine, base, tensors, folder)
            right.append(served(engine, tensors, probe))
            missing = check(engine.url, engine.key, engine.base_name, engine.base_name, probe)
            caught.setdefault(f"size {size}: missing", []).append(missing)
            elsewhere = served(engine, tensors, probe_of(engine, other_base, tensors, folder))
            caught.setdefault(f"size {size}: another base", []).append(elsewhere)
            for name, wrong in faults(tensors, made(seed + 1000, size)):
                caught.setdefault(f"size {size}: {name}", []).append(served(engine, wrong, probe))
    figures: dict[str, float] = {
        "right_accepted": sum(result.accepted for result in right) / len(right),
        "claimed_least_nats": min(result.claimed for result in right),
        "base_error_nats": max(result.base_error for result in right),
        "right_error_nats": max(result.error for result in right),
        "right_error_of_one_token_nats": max(result.max_error for result in right),
        "right_error_over_tolerance": max(result.error / result.tolerance for result in right),
        "tolerance_least_nats": min(result.tolerance for result in right),
    }
    for name, results in caught.items():
        figures[f"caught, {name}"] = sum(not result.accepted for result in results) / len(results)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="tiny-dense")
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    found = ensure_base(BaseConfig(name=given.base), load_params(given.params).paths)
    folder = Path(tempfile.mkdtemp())
    engine = start_engine(found.path, folder / "engine", slots=4, dtype=given.dtype)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    try:
        figures = measure(engine, getattr(torch, given.dtype), seeds, folder / "revisions")
    finally:
        stop_engine(engine)
        shutil.rmtree(folder, ignore_errors=True)
    right = figures["right_accepted"] == 1.0
    figures = {f"{name}.{given.base}.{given.dtype}": value for name, value in figures.items()}
    record.report("probe", figures, BOUNDS, {}, right, given.out)


if __name__ == "__main__":
    main()
