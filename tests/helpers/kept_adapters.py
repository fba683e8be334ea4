"""Real small adapters in a catalog and a store, without a base, as `import` leaves them."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from engine.adapters import packed
from engine.adapters.revision import Tensors, make_manifest, write_revision
from engine.catalog.catalog import Catalog, Policy, Revision, migrate
from engine.catalog.opening import whole_catalog
from engine.settings.params import Params
from engine.store.open import open_store
from engine.store.segments import Store
from tests.helpers.live import free_port
from tests.helpers.made_adapters import canonical, shapes

BASE = "ba" * 32
SHAPES = shapes("qwen3")


def settings(tmp_path: Path) -> Path:
    """Write a file of settings whose state lies beside it; no trainer of somebody else is asked."""
    file = tmp_path / "params.yaml"
    file.write_text(f"state_dir: state\nsuites_dir: suites\ntrainer: {{port: {free_port()}}}\n")
    return file


def add_policy(params: Params, *names: str, owner: str = "me") -> Catalog:
    """Return the catalog, which has these policies."""
    migrate(params.paths.catalog_url)
    catalog = whole_catalog(params.paths.catalog_url)
    for name in names:
        catalog.policies.add(Policy(name, BASE, {"suite": "x"}, owner, 1.0))
    return catalog


def keep(
    params: Params,
    catalog: Catalog,
    policy: str,
    seeds: Iterable[int],
    exported: bool = False,
    into: Store | None = None,
) -> list[Revision]:
    """Bring a random adapter for each seed into store and catalog; with its directory if `exported`."""
    rows = []
    with closing(open_store(params)) as own:
        store = into or own
        for seed in seeds:
            tensors: Tensors = canonical(SHAPES, seed=seed)
            manifest = make_manifest(
                tensors, policy=policy, base_digest=BASE, rank=2, targets=SHAPES.targets, step=seed,
                config={"seed": seed},
            )  # fmt: skip
            whole = packed.pack(tensors, torch.float32, SHAPES.fused)
            at = store.append(whole.tobytes())
            catalog.layouts.add(whole.layout.digest, whole.layout.to_json())
            values = {
                "policy": policy, "digest": manifest.digest, "base": BASE, "parent": None, "step": seed,
                "rank": 2, "bytes": manifest.bytes, "layout": whole.layout.digest, "segment": at.segment,
                "offset": at.offset, "length": at.length, "checksum": at.checksum, "state": "exported",
                "owner": "me", "created_at": float(seed),
            }  # fmt: skip
            row = Revision(**values)
            assert catalog.revisions.add_many([row])[0]
            if exported:
                write_revision(params.paths.revision(policy, row.digest), tensors, manifest, {"rows": [seed]})
            rows.append(row)
    return rows


def bare(policy: str, number: int, **fields: Any) -> Revision:
    """Return a row without bytes, for tests that only list."""
    digest = f"{number:06x}" * 10 + "abcd"
    values: dict[str, Any] = {
        "policy": policy, "digest": digest, "base": BASE, "parent": None, "step": number, "rank": 1,
        "bytes": 64, "layout": "1a" * 32, "segment": f"{'5e' * 16}.seg", "offset": 64 * number, "length": 64,
        "checksum": "c0" * 32, "state": "exported", "owner": "me", "created_at": float(number),
    }  # fmt: skip
    return Revision(**{**values, **fields})
