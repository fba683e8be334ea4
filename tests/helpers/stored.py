"""A state directory with a catalog and a store, and small adapters that are published in it."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.adapters import packed, revision
from engine.adapters.revision import make_manifest
from engine.catalog.catalog import Base, Catalog, Policy, Revision, migrate
from engine.catalog.opening import whole_catalog
from engine.catalog.revision_rows import location
from engine.publishing.publish import publish, put, stored_tensors
from engine.settings.params import Params
from engine.store.open import open_store
from engine.store.segments import Store
from tests.helpers.made_adapters import CONFIGS, canonical, shapes

BASE, KIND = "b" * 64, "qwen3"
SHAPES = shapes(KIND)
# What an older engine fused: nothing.
OLDER: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Stored:
    params: Params
    catalog: Catalog
    store: Store

    def publish(self, policy: str, seed: int, expires_at: float | None = None, rank: int = 2) -> Revision:
        state = "exported" if expires_at is None else "snapshot"
        place = partial(put, *placing(self, policy, seed, rank))
        return publish(self.catalog, self.store, place, state=state, expires_at=expires_at)

    def publish_older(self, policy: str, seed: int) -> Revision:
        """Publish a revision as an engine packed it that fuses nothing."""
        tensors = canonical(SHAPES, seed=seed)
        whole = packed.pack(tensors, torch.float32, OLDER)
        manifest = manifest_of(policy, tensors, seed, 2)
        at = self.store.append(whole.tobytes())
        self.catalog.layouts.add(whole.layout.digest, whole.layout.to_json())
        row = Revision(
            policy, manifest.digest, BASE, None, seed, 2, manifest.bytes, whole.layout.digest,
            **at._asdict(), state="exported", owner="me", created_at=time.time(),
        )  # fmt: skip
        self.catalog.revisions.add_many([row])
        self.store.committed()
        return row

    def row(self, row: Revision) -> Revision:
        return self.catalog.revisions.get(row.policy, row.digest)

    def is_whole(self, row: Revision) -> bool:
        """Say whether what is served under a row is what its digest names, by the tensors themselves."""
        now = self.row(row)
        tensors = stored_tensors(self.catalog, self.store, now)
        targets = sorted({revision.split_key(key)[0].rpartition(".")[2] for key in tensors})
        return revision.digest(tensors, now.rank, targets, now.base) == row.digest

    def damage(self, row: Revision) -> None:
        at = location(self.row(row))
        with self.store.path(at.segment).open("r+b") as file:
            file.seek(at.offset + 5)
            byte = file.read(1)
            file.seek(at.offset + 5)
            file.write(bytes([byte[0] ^ 1]))


def placing(state: Stored, policy: str, seed: int, rank: int = 2) -> tuple[Any, ...]:
    """Return what `put` takes of the adapter of a seed."""
    tensors = canonical(SHAPES, seed=seed, default=rank)
    manifest = manifest_of(policy, tensors, seed, rank)
    return state.catalog, state.store, tensors, manifest, torch.float32, SHAPES, "me", time.time()


def manifest_of(policy: str, tensors: revision.Tensors, seed: int, rank: int) -> revision.Manifest:
    targets = tuple(sorted({revision.split_key(key)[0].rpartition(".")[2] for key in tensors}))
    return make_manifest(tensors, policy=policy, base_digest=BASE, rank=rank, targets=targets, step=seed)


def write_base(directory: Path) -> Path:
    """Write as much of a base as the adapters' shapes need."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": KIND, **CONFIGS[KIND]}))
    return directory


def prepare(params: Params, *policies: str) -> None:
    migrate(params.paths.catalog_url)
    with closing(whole_catalog(params.paths.catalog_url)) as catalog:
        base = write_base(params.paths.bases / KIND)
        catalog.bases.add(Base(BASE, KIND, str(base), time.time()))
        for name in policies:
            catalog.policies.add(Policy(name, BASE, {}, "me", time.time()))


@contextmanager
def opened(params: Params) -> Iterator[Stored]:
    with closing(whole_catalog(params.paths.catalog_url)) as catalog, closing(open_store(params)) as store:
        yield Stored(params, catalog, store)
