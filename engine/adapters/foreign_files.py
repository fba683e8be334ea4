"""Reading of untrusted adapter directories: the tensors' file and peft's settings.

Every limit is checked on names and sizes, before a byte of a tensor is read: a file cannot make this
process use memory or time beyond its own bounds.
"""

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from engine.adapters.module_patterns import Patterns
from engine.adapters.packed import DTYPES
from engine.adapters.peft_settings import refuse_unserved
from engine.adapters.revision import CONFIG, TENSORS
from engine.errors import AdapterError

# Kimi-K2's 138,000 per-expert tensors take about 21 MiB of header; safetensors itself stops at 100 MB.
HEADER_LIMIT = 32 << 20
CONFIG_LIMIT = 1 << 20
# The largest `max_lora_rank` of vLLM 0.32 (vllm/config/lora.py).
RANK_LIMIT = 512
# Names that a message may repeat: short, without control characters.
NAMES = re.compile(r"[!-~]{1,300}")
LARGEST = 1e12
# So many patterns may need a search of each module's path.
SEARCHED_LIMIT = 16
# What MLX writes: its own settings in a file of peft's name.
MLX_FIELDS, MLX_TENSORS = frozenset({"lora_parameters", "fine_tune_type"}), "adapters.safetensors"
SHARD = re.compile(r"adapter_model-\d+-of-\d+\.safetensors|adapter_model\.safetensors\.index\.json")
# A Hugging Face cache: models--ORG--NAME/snapshots/COMMIT has links into models--ORG--NAME/blobs.
CACHED, SNAPSHOTS, BLOBS = "models--", "snapshots", "blobs"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Scaling:
    """Rank and alpha of an adapter's modules, as in peft's LoraConfig, and the base that it names."""

    rank: int
    alpha: float
    by_root: bool
    ranks: Patterns
    alphas: Patterns
    base_name: str = ""

    def expected_rank(self, module: str) -> int:
        """Return the rank that the settings give a module."""
        return int(self.ranks.get(module, self.rank))

    def factor(self, module: str) -> float:
        """Return B's scale: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732)."""
        rank = self.expected_rank(module)
        return float(self.alphas.get(module, self.alpha)) / (math.sqrt(rank) if self.by_root else rank)


def read_scaling(directory: Path) -> Scaling:
    """Read `adapter_config.json`; `AdapterError` for anything that is not plain LoRA."""
    path = own_file(directory, CONFIG, CONFIG_LIMIT)
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise AdapterError(f"{path} is not JSON.") from None
    if not isinstance(values, dict):
        raise AdapterError(f"{path} must hold one object of settings, such as peft writes.")
    if MLX_FIELDS & values.keys() and "peft_type" not in values:
        raise AdapterError(
            f"{path} is of an adapter that MLX made. Convert it to peft's form: each lora_a and lora_b "
            "transposed as lora_A.weight and lora_B.weight, r the rank, lora_alpha the scale times the rank."
        )
    refuse_unserved(str(path), values)
    return Scaling(
        rank=_number(path, "r", values.get("r"), whole=True),
        alpha=_number(path, "lora_alpha", values.get("lora_alpha")),
        by_root=bool(values.get("use_rslora")),
        ranks=_patterns(path, "rank_pattern", values, whole=True),
        alphas=_patterns(path, "alpha_pattern", values),
        base_name=re.sub(r"[^ -~]", "?", str(values.get("base_model_name_or_path") or "")[:300]),
    )


def _number(path: Path, key: str, value: Any, whole: bool = False) -> Any:
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not 0 < value <= LARGEST:
        raise AdapterError(
            f"{path} sets {key} to {_short(value)}; it must be a positive {'whole ' * whole}number."
        )
    return value


def _short(value: Any) -> str:
    return repr(value)[:80]


def _patterns(path: Path, key: str, values: dict[str, Any], whole: bool = False) -> Patterns:
    given = values.get(key) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{path} sets {key} to {_short(given)}; it must map modules to numbers.")
    numbers = {one: _number(path, f"{key}[{one[:80]}]", value, whole) for one, value in given.items()}
    for one in numbers:
        try:
            Patterns({one: 0})
        except ValueError as error:
            raise AdapterError(
                f"{path} has the pattern {one[:80]!r} in {key}, which cannot be read: {error}. "
                "Write the modules' paths there."
            ) from None
    patterns = Patterns(numbers)
    if len(patterns.searched) > SEARCHED_LIMIT:
        raise AdapterError(
            f"{path} has {len(patterns.searched)} regular expressions in {key}, over {SEARCHED_LIMIT}. "
            "Write the modules' paths there."
        )
    return patterns


def own_file(directory: Path, name: str, limit: int | None = None) -> Path:
    """Return a regular file of the directory; `AdapterError` for a missing, too large or foreign one."""
    path = directory / name
    # A link inside the directory is fine; one to the outside could read any file of this machine.
    if not any(path.resolve().is_relative_to(place) for place in _own_places(directory.resolve())):
        raise AdapterError(
            f"{path} is a link out of its directory, to {path.resolve()}. Replace it by a copy."
        )
    if not path.exists():
        raise AdapterError(f"{directory} has no {name}.{_missing_reason(directory)}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise AdapterError(f"{path} is not a regular file.")
    if limit is not None and (size := path.stat().st_size) > limit:
        raise AdapterError(f"{path} has {size} bytes; it may have at most {limit}.")
    return path


def _own_places(directory: Path) -> Iterator[Path]:
    """Yield where the links of a directory may lead: into itself, and in a cache into its blobs."""
    yield directory
    for parent in directory.parents:
        if parent.name == SNAPSHOTS and parent.parent.name.startswith(CACHED):
            yield parent.parent / BLOBS


def _missing_reason(directory: Path) -> str:
    """Say what a directory without one of the two files seems to be, or nothing."""
    names = sorted(item.name for item in directory.iterdir())
    if any(SHARD.fullmatch(name) for name in names):
        return (
            " The tensors are in shards, which peft does not read either: load them all with safetensors and "
            f"save them as one {TENSORS}."
        )
    if MLX_TENSORS in names:
        return f" {MLX_TENSORS} is of MLX: convert the adapter to peft's form."
    if "adapter_model.bin" in names:
        return " adapter_model.bin is not opened: save it as safetensors."
    if "config.json" in names and CONFIG not in names:
        return " It is a whole model, perhaps with the adapter merged: set it as `base.name`."
    inner = [name for name in names if (directory / name / CONFIG).is_file()]
    return f" The adapter is in {', '.join(inner[:3])}: give that directory." if inner else ""


def read_entries(directory: Path) -> list[TensorHeader]:
    """Return the headers of the tensors' file, verified to be whole, without reading a tensor.

    Raises `AdapterError` for a missing, linked, pickled, truncated or inconsistent file.
    """
    path = own_file(directory, TENSORS)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _header_length(path, file.read(8), size)
        header = _header(path, file.read(length))
    entries, end = [], 0
    for entry, begin, stop in sorted(_spans(path, header), key=lambda item: item[1:]):
        if begin != end:
            raise AdapterError(f"In {path} the tensor {entry.name} begins at byte {begin}, not at {end}.")
        entries.append(entry)
        end = stop
    if 8 + length + end != size:
        raise AdapterError(
            f"{path} is truncated or has a tail: its header needs {8 + length + end} bytes, it has {size}."
        )
    return entries


def _header_length(path: Path, start: bytes, size: int) -> int:
    if len(start) < 8:
        raise AdapterError(f"{path} has {size} bytes, too few for a safetensors file.")
    length = int.from_bytes(start, "little")
    if length <= min(HEADER_LIMIT, size - 8):
        return length
    # A pickle's first bytes, read as a length, are over the limit; a length may begin with the same byte.
    if start.startswith((b"PK\x03\x04", b"\x80")):
        raise AdapterError(f"{path} is a pickle and is never opened. Save it as safetensors.")
    raise AdapterError(
        f"{path} announces a header of {length} bytes; the file has {size}, the limit is {HEADER_LIMIT}."
    )


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise AdapterError(f"The header of {path} has {_short(twice)} twice.")
        return fields

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise AdapterError(f"The header of {path} is not JSON.") from None
    if not isinstance(header, dict):
        raise AdapterError(f"The header of {path} does not map names to tensors.")
    header.pop("__metadata__", None)
    return header


def _spans(path: Path, header: dict[str, Any]) -> Iterator[tuple[TensorHeader, int, int]]:
    for name, value in header.items():
        try:
            dtype, shape, (begin, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, stop))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not NAMES.fullmatch(name):
            raise AdapterError(
                f"The header of {path} has the tensor name {_short(name)}, which no module has."
            )
        if not whole or not isinstance(dtype, str):
            raise AdapterError(f"The header of {path} does not describe the tensor {name}.")
        if dtype not in DTYPES:
            raise AdapterError(
                f"The tensor {name} has the dtype {dtype[:20]}; use one of {', '.join(DTYPES)}."
            )
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        if stop - begin != needed:
            raise AdapterError(
                f"The tensor {name} {shape} needs {needed} bytes, its header gives {stop - begin}."
            )
        yield TensorHeader(name, dtype, shape), begin, stop


@contextmanager
def opened(directory: Path) -> Iterator[Any]:
    """Open the tensors' file, which `read_entries` has verified, to read one tensor at a time."""
    with safe_open(own_file(directory, TENSORS), framework="pt") as file:
        yield file
