"""What the effect probe's tolerance lets through: errors of a right adapter, and of faults made smaller.

    graftwork bench probe [--base tiny-dense] [--dtype float32|bfloat16] [--seeds 3]

A live engine serves adapters whose B of one projection is scaled by 1 - fault, in all layers or in one; the
probe is our trainer's, of the right adapter. An effect of about a nat is that of a trained revision.
"""

import argparse
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import _record as record
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from live import RunningEngine, start_engine, stop_engine
from test_engine import RANK, prompts, random_adapter

from engine.adapters.importing import shapes_of
from engine.adapters.revision import make_manifest, write_revision
from engine.base import ensure_base
from engine.config import BaseConfig, Paths
from engine.quality.blame import place
from engine.quality.probe import TOLERANCE, Probe, ProbeResult, check
from engine.training.export import Exporter
from engine.training.lora import ResidentBase
from engine.training.protocol import ProbeRevision

FAULTS = (1.0, 0.3, 0.1, 0.03, 0.01)
SIZE = 0.05


def probe_of(engine: RunningEngine, base: ResidentBase, tensors: dict, folder: Path) -> Probe:
    targets = tuple(sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}))
    manifest = make_manifest(
        tensors, policy="bench", base_digest=engine.base_digest, rank=RANK, targets=targets, step=0
    )
    directory = write_revision(folder / manifest.digest, tensors, manifest, {})
    request = ProbeRevision(
        request_id=uuid.uuid4().hex, policy="bench", digest=manifest.digest, directory=str(directory),
        prompts=prompts(8), tokens=24,
    )  # fmt: skip
    dtype = next(iter(tensors.values())).dtype
    exporter = Exporter(Paths(engine.state), engine.catalog, dtype, ())
    return exporter.probe_revision(base, engine.base_digest, request)


def served(engine: RunningEngine, tensors: dict, probe: Probe) -> ProbeResult:
    name = engine.publish("bench", tensors, RANK, next(iter(tensors.values())).dtype)
    return check(engine.url, engine.key, name, engine.base_name, probe)


def weakened(tensors: dict, projection: str, layers: range, fault: float) -> dict:
    def is_in(key: str) -> bool:
        found, layer = place(key)
        return found == projection and layer in layers and key.endswith("B")

    return {key: tensor * (1 - fault) if is_in(key) else tensor for key, tensor in tensors.items()}


def measure(engine: RunningEngine, base: ResidentBase, dtype: torch.dtype, seeds: int, folder: Path) -> dict:
    shapes = shapes_of(engine.base_path)
    right, errors = [], {}
    for seed in range(seeds):
        made = random_adapter(shapes.modules(), seed, size=SIZE)
        tensors = {key: tensor.to(dtype) for key, tensor in made.items()}
        probe = probe_of(engine, base, tensors, folder)
        right.append(served(engine, tensors, probe))
        places = {place(key) for key in tensors}
        for projection in sorted({name for name, _ in places}):
            layers = sorted(layer for name, layer in places if name == projection)
            for where in (range(layers[-1] + 1), range(layers[0], layers[0] + 1)):
                for fault in FAULTS:
                    result = served(engine, weakened(tensors, projection, where, fault), probe)
                    errors.setdefault((fault, len(where) > 1), []).append(result.error)
    figures = {
        "claimed_nats": min(result.claimed for result in right),
        "base_error_nats": max(result.base_error for result in right),
        "right_error_nats": max(result.error for result in right),
        "tolerance_nats": right[0].tolerance,
    }
    for (fault, whole), values in sorted(errors.items(), reverse=True):
        figures[f"{'all layers' if whole else 'one layer'}, B less {fault:.0%}: least"] = min(values)
    for whole in (True, False):
        caught = [fault for fault in FAULTS if min(errors[fault, whole]) > right[0].tolerance]
        figures[f"smallest_always_caught_{'all_layers' if whole else 'one_layer'}"] = min(caught, default=2.0)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="tiny-dense")
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found = ensure_base(BaseConfig(name=given.base), Paths(Path(".graftwork")))
    folder = Path(tempfile.mkdtemp())
    engine = start_engine(found.path, folder / "engine", slots=4, dtype=given.dtype)
    try:
        base = ResidentBase(found.path, 1, 2048)
        figures = measure(engine, base, getattr(torch, given.dtype), given.seeds, folder / "revisions")
    finally:
        stop_engine(engine)
        shutil.rmtree(folder, ignore_errors=True)
    right = figures["right_error_nats"] < figures["tolerance_nats"]
    record.report(f"probe-{given.base}-{given.dtype}", figures, {}, {}, correct=right)


if __name__ == "__main__":
    main()
