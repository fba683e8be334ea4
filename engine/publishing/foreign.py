"""Import of foreign adapters: inspect a directory, then publish it in catalog and store.

Checks run in order: names and sizes, then scaling, then values; nothing is published before the last. A
foreign adapter has no effect probe of our trainer, so the caller passes a function that makes one.
"""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from engine.adapters import foreign_files
from engine.adapters.foreign_files import RANK_LIMIT, Scaling, TensorHeader
from engine.adapters.layout_tensors import to_canonical
from engine.adapters.layouts import Detected, detect
from engine.adapters.manifests import MANIFEST, PROBE
from engine.adapters.packed import DTYPES
from engine.adapters.revision import (
    CONFIG,
    TENSORS,
    Manifest,
    Tensors,
    digest,
    is_finite,
    make_manifest,
    read_manifest,
    split_key,
    targets_of,
    validate,
    write_revision,
)
from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.errors import AdapterError, ConfigError
from engine.publishing.base_files import BaseClaims, read_claims
from engine.publishing.importing import (
    check_fit,
    has_probe,
    import_revision,
    refuse_other_base,
    serving_dtype,
)
from engine.publishing.peft_proof import PeftProof, left_out_reason
from engine.quality.probe import Probe
from engine.settings.params import POLICY_NAME, Params

MakeProbe = Callable[[Manifest, Path], Probe]


@dataclass(frozen=True)
class Found:
    """What an adapter directory holds. `ranks` counts canonical modules by rank; `bytes` are the tensors'."""

    layout: str
    family: str
    dtype: str
    modules: int
    experts: int
    shared_experts: bool
    ranks: Mapping[int, int]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Foreign:
    """An adapter in canonical form, with what was found in its files and beside them."""

    found: Found
    tensors: Tensors = field(repr=False)
    base_name: str = ""
    claims: BaseClaims = field(default_factory=BaseClaims)

    @property
    def rank(self) -> int:
        """Return the largest rank of its modules."""
        return max(self.found.ranks)

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of its projections, sorted."""
        return targets_of(self.tensors)

    def digest(self, base_digest: str) -> str:
        """Return its revision digest on this base, in hex."""
        return digest(self.tensors, self.rank, self.targets, base_digest)


def inspect(params: Params, directory: Path) -> tuple[Foreign, BaseInfo]:
    """Read an adapter for the base of these settings, in the serving dtype.

    Raises as `read_adapter`, `AdapterError` as well for tokens that the base does not have, and
    `BaseModelError` as `refuse_other_base`.
    """
    base = ensure_base(params.base, params.paths)
    refuse_other_base(params, directory, base)
    shapes = BaseShapes.read(base.path)
    foreign = read_adapter(directory, shapes, getattr(torch, serving_dtype(params)))
    return replace(foreign, claims=read_claims(directory, foreign.base_name, base)), base


def publish(
    params: Params,
    directory: Path,
    foreign: Foreign,
    base: BaseInfo,
    policy: str,
    owner: str,
    make_probe: MakeProbe,
    say: Callable[[str], object] = lambda sentence: None,
) -> Manifest:
    """Publish an inspected adapter in catalog and store as a revision of `policy`; idempotent.

    A revision directory of that policy keeps its probe, any other gets one from `make_probe`, which peft must
    reproduce; the manifest's `import` records how that ended, and another base's name. The original files are
    kept beside the revisions, since dtype or scale may have been converted. `say` receives what peft found.
    Raises `ConfigError` for an invalid policy name, and `AdapterError` for a rank that the engine does not
    serve and for an adapter of which peft computes something else.
    """
    if not POLICY_NAME.fullmatch(policy):
        raise ConfigError(f"{policy!r} is not a policy name. Use lower-case letters, digits and dashes.")
    if has_probe(directory) and read_manifest(directory).policy == policy:
        return import_revision(params, directory, owner)
    manifest = make_manifest(
        foreign.tensors,
        policy=policy,
        base_digest=base.digest,
        rank=foreign.rank,
        targets=foreign.targets,
        step=0,
        text_digest=base.text_digest,
    )
    # Refuse what the engine cannot serve before anything is written or computed.
    check_fit(params, base.path, foreign.tensors, manifest, directory)
    made = params.paths.revision(policy, manifest.digest)
    if has_probe(made):
        manifest = import_revision(params, made, owner)
    else:
        params.state_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=params.state_dir) as folder:
            draft = write_revision(Path(folder) / "revision", foreign.tensors, manifest, {})
            probe, proof = _proven(params, directory, foreign, base, lambda: make_probe(manifest, draft))
            say(proof)
            told = {"peft": proof, "named_base": foreign.claims.other_base, "base_name": base.name}
            manifest = replace(manifest, config={"import": told})
            (draft / MANIFEST).write_text(json.dumps(asdict(manifest)))
            (draft / PROBE).write_text(json.dumps(probe.to_json()))
            import_revision(params, draft, owner)
    # Also in a repeated import: the first may have been killed before this.
    _keep_original(directory, made.with_name(f"{made.name}.original"))
    return manifest


def _proven(
    params: Params, directory: Path, foreign: Foreign, base: BaseInfo, make_probe: Callable[[], Probe]
) -> tuple[Probe, str]:
    """Return the effect probe and a sentence on peft's proof of it; `AdapterError` when peft differs."""
    dtype = serving_dtype(params)
    reason = left_out_reason(base, dtype, foreign.found.layout, foreign.found.family)
    if reason:
        return make_probe(), f"The proof by peft is left out: {reason}."
    with PeftProof(base, directory, dtype) as proof:
        probe = make_probe()
        return probe, proof.check(probe)


def _keep_original(directory: Path, kept: Path) -> None:
    if kept.exists():
        return
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=kept.parent))
    for name in (CONFIG, TENSORS):
        shutil.copyfile(directory / name, draft / name)
    draft.rename(kept)


def read_adapter(directory: Path, base: BaseShapes, dtype: torch.dtype | None = None) -> Foreign:
    """Read an adapter directory of any layout as canonical tensors, the scaling folded into B.

    A is (R, I) and B (O, R) for each module; with `dtype` every tensor is converted to it. Raises
    `AdapterError` that names the tensor or the setting at fault; names, sizes and settings are checked before
    any tensor is read.
    """
    if not directory.is_dir():
        raise AdapterError(f"{directory} is not a directory.")
    scaling = foreign_files.read_scaling(directory)
    entries = foreign_files.read_entries(directory)
    detected = detect({entry.name: entry.shape for entry in entries}, base)
    _check_ranks(detected, scaling)
    tensors = _load(directory, detected, scaling, base, dtype)
    validate(tensors, None, base.modules())
    return Foreign(_describe(entries, detected, tensors, base), tensors, scaling.base_name)


def read_tensors(directory: Path, base: BaseShapes) -> dict[str, torch.Tensor]:
    """Return the tensors of `read_adapter` in float32, for a session that starts at them."""
    return dict(read_adapter(directory, base, torch.float32).tensors)


def _check_ranks(detected: Detected, scaling: Scaling) -> None:
    for module, rank in detected.ranks.items():
        factor, _ = detected.pairs[module]
        said, fused = scaling.expected_rank(factor.given), factor.projection == "gate_up_proj"
        # peft doubles the rank of a fused gate_up and keeps alpha / r; not every tool records that.
        if rank != said and not (fused and rank == 2 * said):
            raise AdapterError(
                f"The tensor {factor.name} has the rank {rank}, {CONFIG} says {said}, so its scaling is "
                "unknown. Set rank_pattern and alpha_pattern."
            )
        if rank > RANK_LIMIT * (2 if fused else 1):
            raise AdapterError(
                f"The tensor {factor.name} has the rank {rank}, over vLLM's limit of {RANK_LIMIT}."
            )


def _load(
    directory: Path, detected: Detected, scaling: Scaling, base: BaseShapes, dtype: torch.dtype | None
) -> Tensors:
    tensors: Tensors = {}
    with foreign_files.opened(directory) as file:

        def load(name: str) -> torch.Tensor:
            tensor: torch.Tensor = file.get_tensor(name)
            if not is_finite(tensor):
                raise AdapterError(f"The tensor {name} holds NaN or Inf; this adapter cannot be served.")
            return tensor

        for module, given, (A, B) in to_canonical(detected, load, base):
            tensors[f"{module}.lora_A"] = A.to(dtype or A.dtype, copy=True).contiguous()
            # In float32 whatever the layout, so that every layout rounds alike.
            scaled = B.float() * scaling.factor(given)
            tensors[f"{module}.lora_B"] = scaled.to(dtype or B.dtype).contiguous()
    return tensors


def _describe(entries: list[TensorHeader], detected: Detected, tensors: Tensors, base: BaseShapes) -> Found:
    modules = {split_key(key)[0] for key in tensors}
    shared = f".{base.family.shared}."
    routed = {module.rsplit(".", 2)[0] for module in modules if module not in base.linear}
    return Found(
        layout=detected.layout,
        family=base.family.name,
        dtype=", ".join(sorted({entry.dtype for entry in entries})),
        modules=len(modules),
        experts=max((base.experts[parent].count for parent in routed), default=0),
        shared_experts=any(shared in module for module in modules),
        ranks=dict(sorted(Counter(tensors[f"{module}.lora_A"].shape[0] for module in modules).items())),
        tensors=len(entries),
        bytes=sum(torch.Size(entry.shape).numel() * DTYPES[entry.dtype].itemsize for entry in entries),
    )
