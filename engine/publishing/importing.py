"""Import of a revision directory into a state directory's catalog and store, for its engine to serve.

The base, the digest and every shape, rank and dtype are checked before the engine sees a tensor; the manifest
is not trusted.
"""

import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.adapters.manifests import MANIFEST, stored_probe
from engine.adapters.revision import (
    Manifest,
    Tensors,
    largest_rank,
    other_base,
    read_manifest,
    read_revision,
    targets_of,
    validate,
    write_revision,
)
from engine.base.families import DROPPED_ON_CUDA, BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.catalog import Policy, text_digests
from engine.catalog.opening import open_catalog
from engine.errors import AdapterError, BaseModelError, NotFound
from engine.planning.gpu import cuda_bytes
from engine.planning.tiers import slot_rank
from engine.publishing.publish import publish, put, stored_tensors
from engine.quality.probe import from_json
from engine.settings.params import POLICY_NAME, Params
from engine.store.open import open_store
from engine.version import code_version


def import_revision(params: Params, directory: Path, owner: str = "local") -> Manifest:
    """Validate the revision in `directory`, pack it, and publish it in catalog and store; idempotent.

    The directory, with its effect probe, is copied to the state directory too. Raises `AdapterError` that
    names what does not fit, `BaseModelError` for a revision of another base, and `Conflict` when its
    policy belongs to another owner; then nothing is published.
    """
    base = ensure_base(params.base, params.paths)
    refuse_other_base(params, directory, base)
    tensors, manifest = read_revision(directory)
    check_fit(params, base.path, tensors, manifest, directory)
    probe, now, config = _probe(directory), time.time(), manifest.config
    dtype, shapes = getattr(torch, serving_dtype(params)), BaseShapes.read(base.path)
    # The directory with its probe, then the bytes, then the catalog row, which commits both.
    with open_catalog(params.paths, migrated=True) as catalog:
        # First, since it may refuse.
        catalog.bases.register(base, params.base.text_digest)
        if probe:
            write_revision(params.paths.revision(manifest.policy, manifest.digest), tensors, manifest, probe)
        with suppress(NotFound):
            # An import does not change the settings of a known policy.
            config = catalog.policies.get(manifest.policy).config
        catalog.policies.add(Policy(manifest.policy, base.digest, config, owner, now))
        with closing(open_store(params)) as store:
            place = partial(put, catalog, store, tensors, manifest, dtype, shapes, owner, now)
            # A snapshot that is imported by name becomes an exported revision.
            publish(catalog, store, place, state="exported", expires_at=None)
    return manifest


def check_fit(params: Params, base: Path, tensors: Tensors, manifest: Manifest, directory: Path) -> None:
    """Raise `AdapterError` unless base and engine of these settings can serve the tensors."""
    if not POLICY_NAME.fullmatch(manifest.policy):
        raise AdapterError(f"{directory} names the policy {manifest.policy!r}, which is not a policy name.")
    validate(tensors, None, BaseShapes.read(base).modules())
    _refuse_dropped(tensors, directory)
    largest = largest_rank(tensors)
    if manifest.rank != largest:
        raise AdapterError(
            f"The manifest in {directory} says rank {manifest.rank}, but the largest module has {largest}."
        )
    if manifest.rank > params.engine.max_rank:
        raise AdapterError(
            f"The revision in {directory} has rank {manifest.rank}, over the engine's "
            f"{params.engine.max_rank}. Set `engine.max_rank` to {slot_rank(manifest.rank)} and start the "
            "services anew."
        )
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    serving = serving_dtype(params)
    if dtype != serving:
        # In another dtype the served values would not be those that the digest names.
        raise AdapterError(
            f"The revision in {directory} is in {dtype}, the engine serves {serving}. Set `engine.dtype`."
        )


def refuse_other_base(params: Params, directory: Path, base: BaseInfo) -> None:
    """Raise `BaseModelError` for a revision of ours that was trained on another base or other text files.

    Text files that the base had before others were accepted are its own. Other adapters pass.
    """
    try:
        manifest = read_manifest(directory)
    except AdapterError:
        # Other tools write a manifest.json, too.
        return
    if manifest.base_digest != base.digest:
        raise other_base(directory, manifest, base.digest)
    if manifest.text_digest not in (None, base.text_digest, *text_digests(params.paths, base.digest)):
        raise BaseModelError(
            f"The revision in {directory} was trained with another tokenizer, chat template or generation "
            f"defaults than {base.path} has: text digest {manifest.text_digest}, not {base.text_digest}. "
            "Copy these files from the base that it was trained on. To serve it with those here, set "
            "text_digest in its manifest.json to null."
        )


def _refuse_dropped(tensors: Tensors, directory: Path) -> None:
    dropped = sorted(set(targets_of(tensors)) & DROPPED_ON_CUDA.keys())
    if dropped and cuda_bytes() is not None:
        raise AdapterError(f"{directory} has the target {dropped[0]}: {DROPPED_ON_CUDA[dropped[0]]}.")


def serving_dtype(params: Params) -> str:
    """Return the dtype in which the engine serves adapters on this machine."""
    return params.engine.dtype_on(cuda_bytes() is not None)


def directory_from_store(params: Params, policy: str, digest: str, target: Path) -> Path:
    """Write the revision directory of a catalog row from its packed bytes, which every snapshot has too.

    It has no effect probe. Raises `NotFound` when the catalog does not have the revision, and `DamagedBytes`
    or `MissingBytes` when the store cannot give its bytes.
    """
    with open_catalog(params.paths) as catalog:
        row = catalog.revisions.get(policy, digest)
        with closing(open_store(params)) as store:
            tensors = stored_tensors(catalog, store, row)
    manifest = Manifest(
        digest=row.digest,
        base_digest=row.base,
        policy=row.policy,
        parent=row.parent,
        step=row.step,
        rank=row.rank,
        targets=targets_of(tensors),
        tensor_count=len(tensors),
        bytes=row.bytes,
        code_version=code_version(),
        created_at=row.created_at,
    )
    return write_revision(target, tensors, manifest, {})


def has_probe(directory: Path) -> bool:
    """Say whether `directory` holds a revision with a usable effect probe."""
    try:
        return (directory / MANIFEST).is_file() and bool(_probe(directory))
    except AdapterError:
        return False


def _probe(directory: Path) -> dict[str, Any]:
    """Read a revision's probe; {} when it has none, `AdapterError` when it is malformed."""
    body = stored_probe(directory)
    if body:
        from_json(body)
    return body
