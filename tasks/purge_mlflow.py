"""Purges a policy from MLflow: its registered model, versions, logged models, runs and artifacts.

Works on MLflow's database and artifact directory, whether the server runs or not. `mlflow gc` is not used:
besides the given runs it removes every deleted experiment of anyone (MLflow 3.17.2, `mlflow/cli`).
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from engine.settings.params import Params

PAGE = 100


def purge_mlflow(params: Params, policy: str, on_elsewhere: Callable[[str], object]) -> dict[str, int]:
    """Remove everything of a policy; return the counts by kind. What is already gone is not counted.

    Artifacts outside `mlartifacts` stay; `on_elsewhere` gets their address before their row is removed.
    """
    backend = params.mlflow.backend or f"sqlite:///{params.paths.mlflow_db}"
    removed = {"versions": 0, "models": 0, "logged_models": 0, "runs": 0, "artifact_bytes": 0, "elsewhere": 0}
    if params.mlflow.backend is None and not params.paths.mlflow_db.is_file():
        return removed
    # The import takes seconds.
    from mlflow import MlflowClient
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    client = MlflowClient(tracking_uri=backend, registry_uri=backend)
    store = SqlAlchemyStore(backend, str(params.paths.mlartifacts))
    removed |= _remove_model(client, policy)
    experiments = [one.experiment_id for one in _every(client.search_experiments, view_type=_ALL)]
    tagged = f"tags.`graftwork.policy` = '{policy}'"

    def clear(address: str) -> None:
        size = _remove_artifacts(params.paths.mlartifacts, address)
        removed["artifact_bytes"] += size or 0
        if size is None:
            on_elsewhere(address)
            removed["elsewhere"] += 1

    for model in list(_every(client.search_logged_models, experiments, tagged)):
        clear(model.artifact_location)
        # Artifacts first: without the row they could not be found again.
        store._hard_delete_logged_model(model.model_id)
        removed["logged_models"] += 1
    for run in list(_every(client.search_runs, experiments, tagged, _ALL)):
        clear(run.info.artifact_uri)
        store._hard_delete_run(run.info.run_id)
        removed["runs"] += 1
    return removed


# mlflow.entities.ViewType.ALL, without the import.
_ALL = 3


def _remove_model(client: Any, policy: str) -> dict[str, int]:
    named = f"name = '{policy}'"
    versions = sum(1 for _ in _every(client.search_model_versions, named))
    models = len(client.search_registered_models(named))
    if models:
        client.delete_registered_model(policy)
    return {"versions": versions, "models": models}


def _every(search: Callable[..., Any], *arguments: Any, **named: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*arguments, max_results=PAGE, page_token=token, **named)
        yield from page
        token = page.token
        if not token:
            return


def _remove_artifacts(root: Path, uri: str) -> int | None:
    """Remove the artifacts at an address of our MLflow server; return their bytes.

    Returns None, and removes nothing, for an address outside `root`.
    """
    parts = urlparse(uri)
    path = unquote(parts.path).strip("/")
    if parts.scheme not in ("mlflow-artifacts", "file", ""):
        return None
    folder = (root / path if parts.scheme == "mlflow-artifacts" else Path("/") / path).resolve()
    # The address ends in `artifacts`, inside the directory of the run or model.
    own = folder.parent if folder.name == "artifacts" else folder
    if root.resolve() not in own.parents:
        return None
    if not own.is_dir():
        return 0
    size = sum(file.stat().st_size for file in own.rglob("*") if file.is_file())
    shutil.rmtree(own)
    return size
