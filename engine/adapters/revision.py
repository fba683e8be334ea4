"""Revisions: canonical tensors, their digest, and the directory that `peft` opens unchanged.

Canonical tensors map a base module's path plus side, such as
`model.layers.0.self_attn.q_proj.lora_A` (rank, in) and `...lora_B` (out, rank), to tensors in serving
dtype with the scaling folded into B, so that alpha equals rank.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from engine.adapters.manifests import MANIFEST, PROBE
from engine.base.families import EXPERT, PROJECTIONS
from engine.errors import AdapterError, BaseModelError, Conflict
from engine.file_lock import alone_in
from engine.files import sync, write_whole
from engine.version import code_version

KEY = re.compile(r"(?P<module>.+)\.(?P<side>lora_[AB])")
PEFT_PREFIX = "base_model.model."
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Manifest:
    """A revision's description of itself. `bytes` counts tensor bytes; `created_at` is epoch seconds.

    `rank` is the largest of its modules' ranks; the digest covers each module's rank by its tensors' shapes.
    """

    digest: str
    base_digest: str
    policy: str
    parent: str | None
    step: int
    rank: int
    targets: tuple[str, ...]
    tensor_count: int
    bytes: int
    code_version: str
    config: dict[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    # Of the base, where it is known; its own digest does not cover it.
    text_digest: str | None = None


def digest(tensors: Tensors, rank: int, targets: Iterable[str], base_digest: str) -> str:
    """Return the digest of canonical tensors, 64 hex characters, independent of any file layout.

    sha256 over a header (rank, alpha, targets, base digest, and each tensor's module, side, expert,
    shape and dtype) and then the tensors' bytes, both in the order of the sorted keys.
    """
    state = hashlib.sha256(digest_header(tensors, rank, targets, base_digest))
    for key in sorted(tensors):
        state.update(tensor_bytes(tensors[key]))
    return state.hexdigest()


def digest_header(tensors: Tensors, rank: int, targets: Iterable[str], base_digest: str) -> bytes:
    """Return the bytes that a digest covers before the values; adapters of the same shapes share them."""
    header = {
        "rank": rank,
        "alpha": rank,
        "targets": sorted(targets),
        "base": base_digest,
        "tensors": [_describe(key, tensors[key]) for key in sorted(tensors)],
    }
    return json.dumps(header, separators=(",", ":")).encode()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes, row-major, without a copy where it is contiguous."""
    # Flat first: an axis of one element may have any stride, as in a B of rank 1 that was a slice.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def is_finite(tensor: torch.Tensor) -> bool:
    """Say whether no value is NaN or infinite; the extremes show it in a fortieth of `isfinite`'s time."""
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _describe(key: str, tensor: torch.Tensor) -> tuple[str, str, int, list[int], str]:
    module, side = split_key(key)
    expert = EXPERT.fullmatch(module)
    number = int(expert["number"]) if expert else -1
    return module, side, number, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def split_key(key: str) -> tuple[str, str]:
    """Split a canonical key into module path and side; `AdapterError` when it is not one."""
    match = KEY.fullmatch(key)
    if match is None:
        raise AdapterError(
            f"The tensor {key!r} is not a LoRA factor: its name must end in .lora_A or .lora_B."
        )
    return match["module"], match["side"]


def targets_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the projections that canonical keys belong to, sorted."""
    return tuple(sorted({split_key(key)[0].rpartition(".")[2] for key in keys}))


def largest_rank(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return an adapter's rank: the largest of its modules'."""
    return max(tensor.shape[0] for key, tensor in tensors.items() if key.endswith(".lora_A"))


def validate(tensors: Tensors, rank: int | None, shapes: Shapes) -> None:
    """Raise `AdapterError` for tensors that do not fit a base; it names the tensor and both shapes.

    `shapes` maps each module of the base that can carry LoRA to its (in, out). Without `rank` each module
    has its own, the first size of its A.
    """
    if not tensors:
        raise AdapterError("The adapter holds no tensors, so it would serve the base itself.")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        raise AdapterError(f"The adapter mixes the dtypes {', '.join(sorted(map(str, dtypes)))}; use one.")
    for key, tensor in tensors.items():
        module, side = split_key(key)
        own = module_rank(tensors, module) if rank is None else rank
        _check_tensor(key, tensor, own, shapes)
        other = f"{module}.lora_{'B' if side == 'lora_A' else 'A'}"
        if other not in tensors:
            raise AdapterError(f"The adapter has the tensor {key} but not its other half {other}.")


def module_rank(tensors: Tensors, module: str) -> int:
    """Return the rank of one module, read from its A; `AdapterError` when it has none."""
    A = tensors.get(f"{module}.lora_A")
    if A is None or A.ndim != 2 or A.shape[0] == 0:
        raise AdapterError(f"The adapter has no {module}.lora_A of two axes, (rank, in).")
    return A.shape[0]


def _check_tensor(key: str, tensor: torch.Tensor, rank: int, shapes: Shapes) -> None:
    module, side = split_key(key)
    if module not in shapes:
        raise AdapterError(f"The tensor {key} is for the module {module}, which the base does not have.")
    size_in, size_out = shapes[module]
    expected = (rank, size_in) if side == "lora_A" else (size_out, rank)
    shape = tuple(tensor.shape)
    if shape != expected:
        raise AdapterError(f"The tensor {key} has the shape {shape}; the base needs {expected}.")
    if not is_finite(tensor):
        raise AdapterError(f"The tensor {key} holds NaN or Inf; this adapter cannot be served.")


def make_manifest(
    tensors: Tensors,
    *,
    policy: str,
    base_digest: str,
    rank: int,
    targets: tuple[str, ...],
    step: int,
    parent: str | None = None,
    config: dict[str, Any] | None = None,
    text_digest: str | None = None,
) -> Manifest:
    """Describe canonical tensors as a revision of `policy`, created now; computes their digest."""
    return Manifest(
        digest=digest(tensors, rank, targets, base_digest),
        base_digest=base_digest,
        policy=policy,
        parent=parent,
        step=step,
        rank=rank,
        targets=targets,
        tensor_count=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        code_version=code_version(),
        config=config or {},
        created_at=time.time(),
        text_digest=text_digest,
    )


def write_revision(directory: Path, tensors: Tensors, manifest: Manifest, probe: dict[str, Any]) -> Path:
    """Publish a revision at `directory`: write a draft beside it, fsync it, read it back, rename it.

    A directory that holds the revision already only gets a missing probe; `Conflict` when it holds another.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(directory.parent, waits=True):
        return _write_alone(directory, tensors, manifest, probe)


def _write_alone(directory: Path, tensors: Tensors, manifest: Manifest, probe: dict[str, Any]) -> Path:
    if directory.exists():
        stored_digest = read_manifest(directory).digest
        if stored_digest != manifest.digest:
            raise Conflict(
                f"{directory} already holds the revision {stored_digest}; revisions are never overwritten."
            )
        _add_probe(directory / PROBE, probe)
        return directory
    # A name of the revision's own: a draft that a kill left is replaced, never added to.
    draft = directory.with_name(f".draft-{directory.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(0o700)
    try:
        _write_files(draft, tensors, manifest, probe)
        read_revision(draft, manifest.base_digest)
        os.replace(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync(directory.parent)
    return directory


def _add_probe(file: Path, probe: dict[str, Any]) -> None:
    """Write a probe unless there is one of this dtype: an existing one is the trainer's own."""
    if not probe or _has_rows(file, probe.get("dtype")):
        return
    write_whole(file, _json(probe), durable=True)


def _has_rows(file: Path, dtype: str | None) -> bool:
    try:
        probe = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(probe, dict) and bool(probe.get("rows")) and probe.get("dtype") == dtype


def _write_files(draft: Path, tensors: Tensors, manifest: Manifest, probe: dict[str, Any]) -> None:
    named = {f"{PEFT_PREFIX}{key}.weight": tensor.contiguous() for key, tensor in sorted(tensors.items())}
    files = {
        TENSORS: save_safetensors(named, metadata={"format": "pt"}),
        CONFIG: _json(_peft_config(tensors, manifest)),
        MANIFEST: _json(asdict(manifest)),
        PROBE: _json(probe),
    }
    for name, content in files.items():
        (draft / name).write_bytes(content)
        sync(draft / name)
    sync(draft)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


def _peft_config(tensors: Tensors, manifest: Manifest) -> dict[str, Any]:
    modules = {split_key(key)[0]: tensors[key].shape[0] for key in sorted(tensors) if key.endswith("lora_A")}
    routed = {module for module in modules if EXPERT.fullmatch(module)}
    paths = {module: _peft_path(module, bool(routed)) for module in modules}
    special = {paths[module]: rank for module, rank in modules.items() if rank != manifest.rank}
    patterns = {"rank_pattern": special, "alpha_pattern": special} if special else {}
    # Without `model.layers.N.`, so that it applies to every layer.
    parameters = {path.split(".", 3)[3] for path in paths.values() if path.endswith(".weight")}
    if routed and not any(module.endswith("down_proj") for module in routed):
        # peft looks for gate and up in a wrapper inside that of down; without tensors down stays zero.
        parameters.add("mlp.experts.down_proj")
    return {
        **patterns,
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": manifest.rank,
        "lora_alpha": manifest.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(manifest.targets),
    }


def _peft_path(module: str, routed: bool) -> str:
    """Return the name for peft to wrap: beside `routed` experts a linear gate, up or down is a parameter.

    As a module it would be skipped: peft takes the name for the experts' own.
    """
    linear = routed and not EXPERT.fullmatch(module) and module.rpartition(".")[2] in PROJECTIONS
    return f"{module}.weight" if linear else module


def read_revision(directory: Path, base_digest: str | None = None) -> tuple[Tensors, Manifest]:
    """Read a revision directory and verify it against its manifest.

    Raises `AdapterError` for a missing, truncated, pickled or altered file, and `BaseModelError`
    when it was trained on another base than `base_digest`.
    """
    manifest = read_manifest(directory)
    if base_digest is not None and manifest.base_digest != base_digest:
        raise other_base(directory, manifest, base_digest)
    tensors = read_peft_tensors(directory)
    for key, tensor in tensors.items():
        if not is_finite(tensor):
            raise AdapterError(f"The tensor {key} in {directory} holds NaN or Inf.")
    content_digest = digest(tensors, manifest.rank, manifest.targets, manifest.base_digest)
    if content_digest != manifest.digest:
        raise AdapterError(
            f"The tensors in {directory} have the digest {content_digest}, not {manifest.digest}."
        )
    return tensors, manifest


def other_base(directory: Path, manifest: Manifest, base_digest: str) -> BaseModelError:
    """Return the error of a revision that belongs to another base than the one with this digest."""
    return BaseModelError(
        f"The revision in {directory} belongs to the base {manifest.base_digest[:12]}, not to the "
        f"resident base {base_digest[:12]}. Train it again on this base, or start with its own base."
    )


def read_peft_tensors(directory: Path) -> Tensors:
    """Read `adapter_model.safetensors` under canonical keys, in its own dtype and scaling."""
    path = directory / TENSORS
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").exists()
        hint = " Pickles are never opened; save it as safetensors." if pickled else ""
        raise AdapterError(f"{directory} has no {TENSORS}.{hint}")
    try:
        named = load_safetensors(path.read_bytes())
    except SafetensorError as error:
        raise AdapterError(f"{path} is not a whole safetensors file ({error}). Copy it again.") from None
    return {name.removeprefix(PEFT_PREFIX).removesuffix(".weight"): tensor for name, tensor in named.items()}


def read_manifest(directory: Path) -> Manifest:
    """Return a revision directory's manifest, unverified; `AdapterError` when it is missing or malformed."""
    path = directory / MANIFEST
    if not path.is_file():
        raise AdapterError(f"{directory} is not a revision: it has no {MANIFEST}.")
    try:
        values = json.loads(path.read_text())
        return Manifest(**{**values, "targets": tuple(values["targets"])})
    except (ValueError, TypeError, KeyError) as error:
        names = ", ".join(item.name for item in fields(Manifest))
        raise AdapterError(f"{path} is not a manifest with the fields {names} ({error}).") from None
