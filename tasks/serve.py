"""Brings a revision made elsewhere into this installation: finds its directory, verifies it, imports it.

The directory may be a download, in this state directory, or in MLflow's registry. The digest identifies the
revision, wherever it comes from.
"""

import tempfile
from pathlib import Path

from engine.adapters.manifests import MANIFEST
from engine.adapters.revision import Manifest, read_manifest
from engine.catalog.opening import open_catalog
from engine.catalog.records import served_name, split_served_name
from engine.errors import AdapterError, Conflict, EffectError, NotFound
from engine.publishing.importing import import_revision
from engine.settings.params import Params
from tasks import flavor
from tasks.register import ensure_up
from tasks.verify import verify


def bring(params: Params, revision: str, directory: Path | None, registry: str | None) -> tuple[str, str]:
    """Import a revision into this state directory; return its policy and full digest. Idempotent.

    `revision` is a digest or POLICY@DIGEST; the digest may be shortened. It comes from `directory`, as MLflow
    exports it, or from the MLflow server `registry`; without both it must be here already. Raises
    `NotFound`, `AdapterError`, `BaseModelError` or `Conflict`.
    """
    policy, digest = split_served_name(revision)
    if digest is None:
        policy, digest = "", policy
    if directory is None and registry is None:
        return _known(params, policy, digest)
    params.state_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=params.state_dir) as scratch:
        source = _holder(directory) if directory else _download(str(registry), policy, digest, Path(scratch))
        manifest = read_manifest(source)
        if not manifest.digest.startswith(digest) or policy not in ("", manifest.policy):
            raise AdapterError(
                f"{source} holds {served_name(manifest.policy, manifest.digest)}, not {revision}."
            )
        proven: Manifest = import_revision(params, source, _owner(params, manifest.policy))
    return proven.policy, proven.digest


def prove(params: Params, policy: str, digest: str, key: str) -> str:
    """Run the revision's effect probe on the engine; return the result's sentence.

    Raises `EffectError` when the engine does not reproduce it, `AdapterError` for a revision without one.
    """
    result = verify(params, policy, digest, key)
    if not result["accepted"]:
        raise EffectError(f"{served_name(policy, digest)} is not served: {result['reason']}")
    return str(result["reason"])


def _owner(params: Params, policy: str) -> str:
    """Return the policy's owner in this catalog, `local` for a new policy."""
    if not params.paths.has_catalog:
        return "local"
    with open_catalog(params.paths) as catalog:
        owner, _ = catalog.policies.owners([policy]).get(policy, ("local", ""))
    return owner


def _known(params: Params, policy: str, digest: str) -> tuple[str, str]:
    rows = []
    if params.paths.has_catalog:
        with open_catalog(params.paths) as catalog:
            rows = [row for row in catalog.listing.starting_with(digest, 100) if policy in ("", row.policy)]
    names = sorted({(row.policy, row.digest) for row in rows})
    if not names:
        raise NotFound(
            f"There is no revision {digest!r} in {params.state_dir}. Give its directory with --from, or the "
            "URL of an MLflow server with --registry."
        )
    if len(names) > 1:
        shown = ", ".join(served_name(*name) for name in names[:5])
        raise Conflict(f"Several digests start with {digest!r}: {shown}. Give POLICY@DIGEST, or more digits.")
    return names[0]


def _holder(directory: Path) -> Path:
    """Return the only directory in this one, itself included, that has a manifest."""
    manifests = sorted(directory.rglob(MANIFEST)) if directory.is_dir() else []
    if len(manifests) != 1:
        raise NotFound(f"{directory} contains {len(manifests)} revisions. Give the directory of one.")
    return manifests[0].parent


def _download(registry: str, policy: str, digest: str, scratch: Path) -> Path:
    from mlflow import MlflowClient

    ensure_up(registry)
    named = f"name = '{policy}' and " if policy else ""
    wanted = f"{named}tags.`graftwork.digest` LIKE '{digest}%'"
    versions = MlflowClient(registry, registry).search_model_versions(wanted)
    if len({version.tags["graftwork.digest"] for version in versions}) > 1:
        raise Conflict(f"Several digests in {registry} start with {digest!r}. Give more digits.")
    if not versions:
        raise NotFound(f"MLflow at {registry} has no version whose digest starts with {digest!r}.")
    return flavor.load_model(versions[0].name, int(versions[0].version), scratch, registry)
