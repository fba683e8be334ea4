"""The MLflow flavour `graftwork`: a model is a revision directory plus the file `MLmodel`.

`peft` opens a download unchanged. A download is verified by its digest. The base is not needed: neither its
weights nor a path of this machine is stored.
"""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.adapters.revision import Manifest, read_revision
from engine.errors import AdapterError
from engine.settings.params import DIGEST12

FLAVOR = "graftwork"
MODEL_FILE = "MLmodel"


def save_model(directory: Path, path: Path, model_id: str | None = None, run_id: str | None = None) -> None:
    """Write the revision in `directory` to `path` as an MLflow model; `AdapterError` if it is damaged."""
    from mlflow.models import Model

    _, manifest = read_revision(directory)
    shutil.copytree(directory, path)
    model = Model(run_id=run_id, model_id=model_id, artifact_path="revision")
    model.add_flavor(FLAVOR, **describe(manifest))
    model.save(str(path / MODEL_FILE))


def load_model(policy: str, version: int, root: Path, url: str) -> Path:
    """Download a policy's version from MLflow at `url` to `root`/policy/digest12; return that directory.

    The directory appears atomically. Raises `AdapterError` when the tensors do not match the digest in
    `MLmodel`.
    """
    from mlflow import MlflowClient, artifacts
    from mlflow.models import Model

    # MLflow resolves `models:/` URIs by a process-wide setting; its client takes an argument.
    source = MlflowClient(url, url).get_model_version_download_uri(policy, str(version))
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".download-", dir=root, ignore_cleanup_errors=True) as draft:
        download = Path(artifacts.download_artifacts(source, dst_path=draft, tracking_uri=url))
        _, manifest = read_revision(download)
        named = Model.load(str(download)).flavors.get(FLAVOR, {}).get("digest")
        if named != manifest.digest:
            raise AdapterError(
                f"{source} names the digest {named}, but its files have the digest {manifest.digest}. "
                "Register the revision again."
            )
        target = root / manifest.policy / manifest.digest[:DIGEST12]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.replace(download, target)
    return target


def describe(manifest: Manifest) -> dict[str, str | int]:
    """Return the facts that a registry shows: digest, base, policy, parent, rank, step, code version.

    An imported adapter that names another base than it is served on has both names too.
    """
    told = manifest.config.get("import", {})
    names = {name: str(told[name]) for name in ("named_base", "base_name")} if told.get("named_base") else {}
    return {
        "digest": manifest.digest,
        "base": manifest.base_digest,
        "policy": manifest.policy,
        "parent": manifest.parent or "",
        "rank": manifest.rank,
        "step": manifest.step,
        "code_version": manifest.code_version,
        **names,
    }
