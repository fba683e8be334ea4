"""Reading of untrusted adapter directories: the tensors' file and peft's settings.

Every limit is checked on names and sizes, before a byte of a tensor is read: a file cannot make this
process use memory or time beyond its own bounds.
"""

import json
import math
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from engine.adapters.packed import DTYPES
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
# peft's patterns are regular expressions; ours are paths with `.*`, whose matching cannot run away.
PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.(?!\*)|\.\*){1,300}\$?")
WILD_LIMIT = 16
# Settings that change what the tensors mean; each must have the value that means plain LoRA.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, [], {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Patterns:
    """peft's `rank_pattern` or `alpha_pattern`: values by module; the first pattern that covers it counts."""

    def __init__(self, values: Mapping[str, Any]):
        self.paths: dict[str, tuple[int, Any]] = {}
        self.wild: list[tuple[int, list[str], Any]] = []
        for i, (pattern, value) in enumerate(values.items()):
            anchored, plain = pattern.startswith("^"), pattern.strip("^$").replace("\\", "")
            # peft wraps a linear module's weight under the name of the parameter.
            plain = plain.removesuffix(".weight")
            pieces = plain.split(".*")
            if len(pieces) > 1:
                self.wild.append((i, pieces, value))
            else:
                self.paths.setdefault("^" * anchored + plain, (i, value))

    def get(self, module: str, default: Any) -> Any:
        """Return the value for a module: a pattern covers the end of its path, from a dot or the start."""
        parts = module.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts))]
        found = [self.paths[end] for end in ("^" + module, *ends) if end in self.paths]
        found += [(i, value) for i, pieces, value in self.wild if any(_covers(pieces, end) for end in ends)]
        return min(found, key=lambda item: item[0])[1] if found else default


def _covers(pieces: list[str], text: str) -> bool:
    first, *middle, last = pieces
    end = len(text) - len(last)
    if not text.startswith(first) or not text.endswith(last) or len(first) > end:
        return False
    at = len(first)
    for piece in middle:
        at = text.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


@dataclass(frozen=True)
class Scaling:
    """Rank and alpha of an adapter's modules, as in peft's LoraConfig."""

    rank: int
    alpha: float
    by_root: bool
    ranks: Patterns
    alphas: Patterns

    def expected_rank(self, module: str) -> int:
        """Return the rank that the settings give a module."""
        return int(self.ranks.get(module, self.rank))

    def factor(self, module: str) -> float:
        """Return B's scale: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732)."""
        rank = self.expected_rank(module)
        return float(self.alphas.get(module, self.alpha)) / (math.sqrt(rank) if self.by_root else rank)


def read_scaling(directory: Path) -> Scaling:
    """Read `adapter_config.json`; `AdapterError` for anything that is not plain LoRA."""
    path = _plain_file(directory, CONFIG)
    if path.stat().st_size > CONFIG_LIMIT:
        raise AdapterError(f"{path} has {path.stat().st_size} bytes; settings take at most {CONFIG_LIMIT}.")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise AdapterError(f"{path} is not JSON.") from None
    if not isinstance(values, dict):
        raise AdapterError(f"{path} must hold one object of settings, such as peft writes.")
    for key, allowed in PLAIN.items():
        if values.get(key, allowed[0]) not in allowed:
            raise AdapterError(
                f"{path} sets {key} to {_short(values[key])}; only plain LoRA can be imported."
            )
    return Scaling(
        rank=_number(path, "r", values.get("r"), whole=True),
        alpha=_number(path, "lora_alpha", values.get("lora_alpha")),
        by_root=bool(values.get("use_rslora")),
        ranks=Patterns(_patterns(path, "rank_pattern", values, whole=True)),
        alphas=Patterns(_patterns(path, "alpha_pattern", values)),
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


def _patterns(path: Path, key: str, values: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{path} sets {key} to {_short(patterns)}; it must map modules to numbers.")
    wild = sum(".*" in pattern for pattern in patterns)
    wrong = [pattern for pattern in patterns if not PATTERN.fullmatch(pattern)]
    if wrong or wild > WILD_LIMIT:
        raise AdapterError(
            f"{path} has the unsupported pattern {(wrong or list(patterns))[0][:80]!r} in {key}, or too many "
            f"patterns. Write module paths there; at most {WILD_LIMIT} may contain `.*`, and none a group."
        )
    return {pattern: _number(path, f"{key}[{pattern}]", value, whole) for pattern, value in patterns.items()}


def _plain_file(directory: Path, name: str) -> Path:
    path = directory / name
    # A link inside the directory is fine; one to the outside could read any file of this machine.
    if not path.resolve().is_relative_to(directory.resolve()):
        raise AdapterError(
            f"{path} is a link out of its directory, to {path.resolve()}. Replace it by a copy."
        )
    if not path.exists():
        pickled = sorted(item.name for item in directory.glob("adapter_model.*") if item.name != TENSORS)
        hint = f" {pickled[0]} is not opened: save it as safetensors." if pickled else ""
        raise AdapterError(f"{directory} has no {name}.{hint}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise AdapterError(f"{path} is not a regular file.")
    return path


def read_entries(directory: Path) -> list[TensorHeader]:
    """Return the headers of the tensors' file, verified to be whole, without reading a tensor.

    Raises `AdapterError` for a missing, linked, pickled, truncated or inconsistent file.
    """
    path = _plain_file(directory, TENSORS)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        _check_start(path, start, size)
        (length,) = struct.unpack("<Q", start)
        header = _header(path, file.read(length))
    entries, end = [], 0
    spans = sorted(_spans(path, header), key=lambda item: (item[1], item[2]))
    for entry, begin, stop in spans:
        if begin != end:
            raise AdapterError(f"In {path} the tensor {entry.name} begins at byte {begin}, not at {end}.")
        entries.append(entry)
        end = stop
    if 8 + length + end != size:
        raise AdapterError(
            f"{path} is truncated or has a tail: its header needs {8 + length + end} bytes, it has {size}."
        )
    return entries


def _check_start(path: Path, start: bytes, size: int) -> None:
    if len(start) < 8:
        raise AdapterError(f"{path} has {size} bytes, too few for a safetensors file.")
    (length,) = struct.unpack("<Q", start)
    if length <= min(HEADER_LIMIT, size - 8):
        return
    # A pickle's first bytes, read as a length, are over the limit; a length may begin with the same byte.
    if start.startswith((b"PK\x03\x04", b"\x80")):
        raise AdapterError(f"{path} is a pickle and is never opened. Save it as safetensors.")
    raise AdapterError(
        f"{path} announces a header of {length} bytes; the file has {size}, the limit is {HEADER_LIMIT}."
    )


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise AdapterError(f"The header of {path} has {_short(twice)} twice.")
        return found

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
    with safe_open(_plain_file(directory, TENSORS), framework="pt") as file:
        yield file
