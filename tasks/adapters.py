"""Find, list and export single adapters of the catalog, and follow their lineage.

A catalog may hold a million rows; one page of them is in memory at a time.
"""

import os
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.adapters.manifests import stored_manifest, stored_probe
from engine.catalog.catalog import Catalog, Revision
from engine.catalog.records import served_name, split_served_name
from engine.errors import AdapterError, ConfigError, Conflict, NotFound, ServiceError
from engine.files import sync
from engine.settings.params import POLICY_NAME, Params
from engine.store.open import open_store

PAGE = 500
DIGITS = re.compile(r"[0-9a-f]{4,64}")
# The most revisions of a lineage tree in each direction.
TREE = 100


def parse(name: str) -> tuple[str, str]:
    """Split POLICY@DIGEST; raises `ConfigError` for anything else."""
    policy, digest = split_served_name(name)
    if POLICY_NAME.fullmatch(policy) and DIGITS.fullmatch(digest or ""):
        return policy, str(digest)
    raise ConfigError(
        f"{name[:100]!r} is not a revision's name. Write POLICY@DIGEST with 4 to 64 digits of the digest, "
        "such as sums@3f9c. `graftwork adapters ls` lists revisions."
    )


def find(catalog: Catalog, name: str) -> Revision:
    """Return the revision POLICY@DIGEST; the digest may be shortened.

    Raises `ConfigError` for a malformed name, `NotFound` with the nearest names for an unknown one, and
    `Conflict` with the candidates for an ambiguous one.
    """
    return catalog.revisions.get(*parse(name))


def pages(
    catalog: Catalog,
    policy: str | None,
    owner: str | None = None,
    retired: bool = False,
    after: str | None = None,
    page: int = PAGE,
) -> Iterator[list[Revision]]:
    """Yield pages of revisions: of a policy newest first, of all policies by digest.

    `after` is the name of the last revision of the page before. Raises `NotFound` for an unknown policy or
    name.
    """
    last = find(catalog, after) if after else None
    if policy is not None:
        catalog.policies.get(policy)
        if last is not None and last.policy != policy:
            raise ConfigError(f"--after {after} is not a revision of {policy}. Name one of this policy.")
        while rows := catalog.revisions.page(policy, last, page, owner=owner, retired=retired):
            yield rows
            last = rows[-1]
        return
    place = (last.digest, last.policy) if last else None
    while rows := catalog.revisions.scan(place, page):
        if wanted := [
            row for row in rows if owner in (None, row.owner) and (retired or row.retired_at is None)
        ]:
            yield wanted
        place = (rows[-1].digest, rows[-1].policy)


def shown(row: Revision) -> dict[str, Any]:
    """Return a revision's row of the list, as JSON values."""
    return {
        "name": served_name(row.policy, row.digest),
        "state": "retired" if row.retired_at is not None else row.state,
        "step": row.step,
        "rank": row.rank,
        "bytes": row.length,
        "owner": row.owner,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
    }


def described(params: Params, catalog: Catalog, row: Revision) -> dict[str, Any]:
    """Return all facts about one revision, as JSON values."""
    route, stone = catalog.routes.get(row.policy), catalog.tombstones.find(row.policy, row.digest)
    roles = [role for role in ("champion", "canary", "previous") if getattr(route, role) == row.digest]
    directory = params.paths.revision(row.policy, row.digest)
    manifest = stored_manifest(directory)
    return {
        "name": served_name(row.policy, row.digest),
        **asdict(row),
        "roles": roles,
        "buried": stone.reason if stone else None,
        "quarantined": catalog.quarantine.reason(row.policy, row.digest),
        "directory": str(directory) if manifest else None,
        "imported": manifest.get("config", {}).get("import"),
    }


def lineage(catalog: Catalog, row: Revision, limit: int = TREE) -> tuple[list[tuple[int, Revision]], bool]:
    """Return a revision with its ancestors (oldest first) and descendants (depth first), each with its depth.

    The depth is 0 for the revision itself, negative for ancestors. The second value is whether there are more
    than `limit` in either direction.
    """
    parents = catalog.listing.parents(row.policy, row.digest, limit)
    ancestors = [(-place, parent) for place, parent in enumerate(parents, start=1)]
    below: list[tuple[int, Revision]] = []
    seen = {row.digest, *(parent.digest for parent in parents)}
    waiting, more = [(0, row)], len(parents) == limit and parents[-1].parent is not None
    while waiting:
        depth, leaf = waiting.pop()
        if len(below) > limit:
            more = True
            break
        below.append((depth, leaf))
        children = catalog.listing.children(row.policy, leaf.digest, limit)
        fresh = [child for child in children if child.digest not in seen]
        seen |= {child.digest for child in fresh}
        waiting += [(depth + 1, child) for child in reversed(fresh)]
        more = more or len(children) == limit
    return [*reversed(ancestors), *below], more


def export(params: Params, catalog: Catalog, row: Revision, target: Path, packed: bool) -> Path:
    """Write a revision atomically as a directory that `peft` opens, or with `packed` as a safetensors file.

    Raises `Conflict` when `target` exists, `NotFound` when its parent does not, `AdapterError` when the
    stored bytes are damaged, and `ServiceError` when writing fails.
    """
    target = target.expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise Conflict(f"{target} exists already and is not overwritten. Give another path.")
    if not target.parent.is_dir():
        raise NotFound(f"There is no directory {target.parent} to write {target.name} into. Create it first.")
    try:
        return (_export_file if packed else _export_directory)(params, catalog, row, target)
    except OSError as error:
        raise ServiceError(
            f"{target} could not be written: {error.strerror}. No partial file is left."
        ) from None


def _export_directory(params: Params, catalog: Catalog, row: Revision, target: Path) -> Path:
    """Write the directory from the local one, with settings and probe, or else from the packed bytes."""
    from engine.adapters.revision import read_revision, write_revision
    from engine.publishing.importing import directory_from_store

    kept = params.paths.revision(row.policy, row.digest)
    stored = None
    with suppress(AdapterError):
        tensors, manifest = read_revision(kept, row.base)
        if manifest.digest == row.digest:
            stored = tensors, manifest
    if stored is None:
        return directory_from_store(params, row.policy, row.digest, target)
    return write_revision(target, *stored, stored_probe(kept))


def _export_file(params: Params, catalog: Catalog, row: Revision, target: Path) -> Path:
    from engine.adapters import packed
    from engine.publishing.publish import stored_packed

    with closing(open_store(params)) as store:
        whole = stored_packed(catalog, store, row)
    said = {"digest": row.digest, "base": row.base, "policy": row.policy, "rank": str(row.rank)}
    with TemporaryDirectory(prefix=".draft-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        draft = Path(folder) / target.name
        packed.write_file(whole, draft, said)
        sync(draft)
        # Unlike a rename, a link fails if the target has appeared meanwhile.
        os.link(draft, target)
        sync(target.parent)
    return target
