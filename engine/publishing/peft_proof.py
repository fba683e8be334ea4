"""An independent proof of an imported adapter: peft computes what its author measured, on a base of its own.

Digest and effect probe compare Graftwork with itself, so a setting that we read wrongly passes both. peft
reads the adapter's files in another process; its log-probabilities must be those that would be served.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from engine.adapters.foreign_files import read_entries
from engine.adapters.layouts import peft_name
from engine.adapters.revision import CONFIG, TENSORS
from engine.base.resident import BaseInfo
from engine.errors import AdapterError
from engine.planning.host import free_bytes
from engine.planning.memory import DTYPE_BYTES, GIB, gib
from engine.quality.probe import MEASURES, TOLERANCE, Probe, gaps

# What peft opens, and the families whose per-expert files it converts.
LAYOUTS, CONVERTED = ("plain", "peft-fused"), ("Qwen3-MoE", "DeepSeek-V3")
# Libraries of peft's process, 450 MB, and what this one still grows by.
RUNTIME = GIB
LIMIT_S = 600.0


def left_out_reason(base: BaseInfo, dtype: str, layout: str, family: str) -> str | None:
    """Return why peft cannot prove an adapter here, or None."""
    if layout not in LAYOUTS and not (layout == "per-expert" and family in CONVERTED):
        return f"peft does not read the layout {layout} on the family {family}"
    config = json.loads((base.path / "config.json").read_text())
    if config.get("quantization_config"):
        return "the base is quantized"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    size = sum(file.stat().st_size for file in base.path.glob("*.safetensors"))
    # Twice: the effect probe may need a copy of its own at the same time.
    needed = 2 * size * DTYPE_BYTES[dtype] // DTYPE_BYTES.get(stored, 2) + RUNTIME
    if needed > (free := free_bytes()):
        return f"a copy of the base needs {gib(needed)} of memory, {gib(free)} are free"
    return None


class PeftProof(AbstractContextManager["PeftProof"]):
    """peft's process for one adapter, which loads while the effect probe is computed; ended as a context."""

    def __init__(self, base: BaseInfo, directory: Path, dtype: str):
        """Start the process on a directory whose files have been checked."""
        self._scratch = TemporaryDirectory(prefix="graftwork-peft-", ignore_cleanup_errors=True)
        folder = Path(self._scratch.name)
        hand_over(directory, folder)
        command = [sys.executable, "-m", "engine.publishing.peft_process", str(os.getpid())]
        self._errors = (folder / "stderr").open("w+")
        self._process = subprocess.Popen(
            [*command, str(base.path), str(folder), dtype],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip

    def __exit__(self, *error: object) -> None:
        """End the process, whatever it is at."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._scratch.cleanup()

    def check(self, probe: Probe, limit_s: float = LIMIT_S) -> str:
        """Compare the probe with peft; return a sentence, or raise `AdapterError` with the worst gap."""
        rows = json.dumps([row.tokens for row in probe.rows])
        try:
            said, _ = self._process.communicate(rows, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise AdapterError(
                f"peft did not finish with the adapter within {limit_s:.0f} s, so nothing is proven. Look at "
                "the patterns in its settings, or import it again while the machine is idle."
            ) from None
        if self._process.returncode:
            raise AdapterError(f"peft cannot open the adapter: {self._last_error()}")
        answer = json.loads(said)
        return compare(probe, answer["rows"], answer["unused"])

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].split("\n")
        last = next(
            (line for line in reversed(lines) if line.strip()), f"it ended {self._process.returncode}"
        )
        return "".join(letter if letter.isprintable() else " " for letter in last)[:400].rstrip(".") + "."


def compare(probe: Probe, theirs: Sequence[Sequence[float]], unused: Sequence[str] = ()) -> str:
    """Return by how much a probe and peft differ; `AdapterError` when it is more than the tolerance."""
    ours = [row.adapter for row in probe.rows]
    differences, moved = gaps(ours, theirs), gaps(ours, [row.base for row in probe.rows])
    error, tolerance = MEASURES[probe.dtype](differences, moved), TOLERANCE[probe.dtype]
    if error <= tolerance:
        return f"peft computes the same within {error:.2g} nats."
    places: list[tuple[int, int]] = [(i, j) for i, row in enumerate(ours) for j in range(len(row))]
    row, token = places[differences.index(max(differences))]
    cause = ""
    if unused:
        cause = (
            f" peft does not use the tensor {unused[0]}: look at target_modules, exclude_modules and "
            "layers_to_transform."
        )
    raise AdapterError(
        "peft computes something else with the adapter than would be served: log-probabilities differ by up "
        f"to {max(differences):.2g} nats (tolerance {tolerance:g}), most at token {token + 1} of prompt "
        f"{row + 1}.{cause}"
    )


def hand_over(directory: Path, folder: Path) -> None:
    """Give peft the two files alone, the tensors under its own names."""
    tensors = (directory / TENSORS).resolve()
    (folder / CONFIG).symlink_to((directory / CONFIG).resolve())
    names = {entry.name: peft_name(entry.name) for entry in read_entries(directory)}
    if all(name == theirs for name, theirs in names.items()):
        (folder / TENSORS).symlink_to(tensors)
    else:
        loaded = load_file(tensors)
        save_file({theirs: loaded[name] for name, theirs in names.items()}, folder / TENSORS)
