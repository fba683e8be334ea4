"""Serve a revision that was made elsewhere: find its directory, prove it, import it.

Knows the places where a revision's directory may be: a download, this state directory, a registry. The
digest says that it is the one; where it came from does not matter.
"""

import tempfile
from pathlib import Path

from engine.adapters.manifests import MANIFEST
from engine.adapters.revision import Manifest, read_manifest
from engine.catalog.catalog import open_catalog
from engine.errors import AdapterError, Conflict, EffectError, NotFound
from engine.publishing.importing import import_revision
from engine.settings.params import Params, served_name, split_served_name
from tasks import flavor
from tasks.register import ensure_up
from tasks.verify import verify


def bring(params: Params, revision: str, directory: Path | None, registry: str | None) -> tuple[str, str]:
    """Bring a revision into this state directory; return its policy and whole digest. Idempotent.

    `revision` is a digest or POLICY@DIGEST, where the digest may be shortened; `directory` holds it, as
    MLflow gives it, or else `registry`, an MLflow server's address. Without both it must be here already.
    Raises `NotFound`, `AdapterError`, `BaseModelError` or `Conflict`.
    """
    policy, digest = split_served_name(revision)
    if digest is None:
        policy, digest = "", policy
    if directory is None and registry is None:
        return _known(params, policy, digest)
    params.state_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=params.state_dir) as scratch:
        found = _holder(directory) if directory else _download(str(registry), policy, digest, Path(scratch))
        manifest = read_manifest(found)
        if not manifest.digest.startswith(digest) or policy not in ("", manifest.policy):
            raise AdapterError(
                f"{found} holds {served_name(manifest.policy, manifest.digest)}, not {revision}."
            )
        proven: Manifest = import_revision(params, found, _owner(params, manifest.policy))
    return proven.policy, proven.digest


def prove(params: Params, policy: str, digest: str, key: str) -> str:
    """Let the engine reproduce the revision's effect probe; return the result's sentence.

    Raises `EffectError` when it does not, `AdapterError` when the revision came without a probe.
    """
    result = verify(params, policy, digest, key)
    if not result["accepted"]:
        raise EffectError(f"{served_name(policy, digest)} is not served: {result['reason']}")
    return str(result["reason"])


def _owner(params: Params, policy: str) -> str:
    """Return whose policy it is here; serving one of its revisions changes nothing of that."""
    if not params.paths.has_catalog:
        return "local"
    with open_catalog(params.paths) as catalog:
        owner, _ = catalog.policies.owners([policy]).get(policy, ("local", ""))
    return owner


def _known(params: Params, policy: str, digest: str) -> tuple[str, str]:
    found = []
    if params.paths.has_catalog:
        with open_catalog(params.paths) as catalog:
            found = [row for row in catalog.listing.starting_with(digest, 100) if policy in ("", row.policy)]
    names = sorted({(row.policy, row.digest) for row in found})
    if not names:
        raise NotFound(
            f"There is no revision {digest!r} in {params.state_dir}. Give its directory with --from, or an "
            "MLflow server with --registry."
        )
    if len(names) > 1:
        shown = ", ".join(served_name(*name) for name in names[:5])
        raise Conflict(
            f"Several revisions begin with {digest!r}: {shown}. Give POLICY@DIGEST, or more of it."
        )
    return names[0]


def _holder(directory: Path) -> Path:
    """Return the directory that holds the manifest: this one, or the only one in it that does."""
    found = sorted(directory.rglob(MANIFEST)) if directory.is_dir() else []
    if len(found) != 1:
        raise NotFound(f"{directory} holds {len(found)} revisions; give the directory of one.")
    return found[0].parent


def _download(registry: str, policy: str, digest: str, scratch: Path) -> Path:
    from mlflow import MlflowClient

    ensure_up(registry)
    named = f"name = '{policy}' and " if policy else ""
    wanted = f"{named}tags.`graftwork.digest` LIKE '{digest}%'"
    versions = MlflowClient(registry, registry).search_model_versions(wanted)
    if len({version.tags["graftwork.digest"] for version in versions}) > 1:
        raise Conflict(f"Several versions in {registry} begin with {digest!r}; give more of the digest.")
    if not versions:
        raise NotFound(f"MLflow at {registry} has no version whose digest begins with {digest!r}.")
    return flavor.load_model(versions[0].name, int(versions[0].version), scratch, registry)
