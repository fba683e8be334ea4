"""Registers exported revisions in MLflow: a registered model for each policy, a version for each revision.

The version is created last, in one call with all its tags, so no partial version is visible. Each step reuses
what an earlier attempt left, so a retry continues from there.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from engine.adapters.revision import Manifest, read_revision
from engine.catalog.records import served_name
from engine.clients.http_client import ServiceClient
from engine.errors import ConfigError, ServiceError
from engine.services.lifecycle import mkl_cbwr
from engine.settings.params import Params
from tasks import flavor

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "graftwork"
# The run's tag for the value of MKL_CBWR.
BITS = "graftwork.mkl_cbwr"


def register(
    params: Params,
    policy: str,
    directory: Path,
    curve: Sequence[Mapping[str, Any]] = (),
    patience_s: float = 60,
) -> int:
    """Register the revision in `directory` and return its version number. Idempotent for a digest.

    `curve` are rows of the ledger's table `train_steps`; their numbers become the run's metrics. A registry
    that is down or failing is retried with exponential backoff for `patience_s` seconds; then raises
    `ServiceError`. Raises `AdapterError` for a damaged revision, `ConfigError` for another policy's.
    """
    _, manifest = read_revision(directory)
    if manifest.policy != policy:
        raise ConfigError(f"{directory} is a revision of {manifest.policy!r}, not of {policy!r}.")
    params.paths.runs.mkdir(parents=True, exist_ok=True)
    attempts = Retrying(
        retry=retry_if_exception_type(ServiceError),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential(multiplier=0.25, max=8),
        reraise=True,
    )
    lock = params.paths.runs / "register.lock"
    return attempts(_register_once, params.url("mlflow"), lock, directory, manifest, curve)


def find_version(client: "MlflowClient", policy: str, digest: str) -> int | None:
    """Return the first version of `policy` whose tag is `digest`, or None."""
    versions = client.search_model_versions(f"name = '{policy}' and tags.`graftwork.digest` = '{digest}'")
    return min((int(version.version) for version in versions), default=None)


def _register_once(
    url: str, lock: Path, directory: Path, manifest: Manifest, curve: Sequence[Mapping[str, Any]]
) -> int:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    ensure_up(url)
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    try:
        # Two concurrent attempts (a retried flow and its zombie) must not create two versions of one digest.
        with FileLock(lock):
            version = find_version(client, manifest.policy, manifest.digest)
            return version or _create_version(client, directory, manifest, curve)
    except MlflowException as error:
        if error.get_http_status_code() < 500:
            raise
        raise ServiceError(f"MLflow at {url} failed: {error}. Check its log, then run this again.") from None


def ensure_up(url: str) -> None:
    """Raise `ServiceError` unless MLflow answers at `url` within 5 s."""
    # MLflow's own client retries a dead server for minutes.
    with ServiceClient("MLflow", url, timeout_s=5) as mlflow:
        if not mlflow.is_healthy():
            raise ServiceError(
                f"MLflow does not answer at {url}. Start it with `graftwork up`, then run this again; it "
                "continues from the exported revision."
            )


def _create_version(
    client: "MlflowClient", directory: Path, manifest: Manifest, curve: Sequence[Mapping[str, Any]]
) -> int:
    tags = {f"graftwork.{name}": str(value) for name, value in flavor.describe(manifest).items()}
    experiment = _experiment(client)
    run = _find_or_start_run(client, experiment, manifest, tags)
    log_steps(client, run, curve, manifest.config)
    run_id = run.info.run_id
    model_id = _upload(client, experiment, run_id, directory, manifest, tags)
    client.set_terminated(run_id)
    policy = manifest.policy
    if not client.search_registered_models(f"name = '{policy}'"):
        client.create_registered_model(policy, tags={"graftwork.policy": policy})
    source = f"models:/{model_id}"
    version = client.create_model_version(
        policy, source, run_id, tags, await_creation_for=0, model_id=model_id
    )
    return int(version.version)


def _experiment(client: "MlflowClient") -> str:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)


def _find_or_start_run(
    client: "MlflowClient", experiment: str, manifest: Manifest, tags: dict[str, str]
) -> "Run":
    """Return a revision's run: an earlier attempt's, its training session's, or a new one."""
    query = f"tags.`graftwork.digest` = '{manifest.digest}' and tags.`graftwork.policy` = '{manifest.policy}'"
    for run in client.search_runs([experiment], query, max_results=1):
        return run
    name = served_name(manifest.policy, manifest.digest)
    if trained := run_of_session(client, manifest.policy, str(manifest.config.get("session"))):
        for tag, value in {**tags, "mlflow.runName": name}.items():
            client.set_tag(trained.info.run_id, tag, value)
        return trained
    return client.create_run(experiment, tags={**tags, BITS: mkl_cbwr()}, run_name=name)


def run_of_session(client: "MlflowClient", policy: str, session: str) -> "Run | None":
    """Return the run with a session's steps, unless it belongs to a revision already."""
    query = f"tags.`graftwork.session` = '{session}' and tags.`graftwork.policy` = '{policy}'"
    runs = client.search_runs([_experiment(client)], query)
    return next((run for run in runs if "graftwork.digest" not in run.data.tags), None)


def start_run_of_session(client: "MlflowClient", policy: str, session: str) -> "Run":
    """Create a run for a training session; registering its revision reuses the run."""
    tags = {"graftwork.session": session, "graftwork.policy": policy, BITS: mkl_cbwr()}
    return client.create_run(_experiment(client), tags=tags, run_name=session)


def log_steps(
    client: "MlflowClient",
    run: "Run",
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
) -> None:
    """Log the numbers of training steps as metrics, and settings as parameters. Idempotent."""
    from mlflow.entities import Metric, Param

    # The same timestamp in all attempts, so that the tracking store drops duplicates.
    at = int(run.info.start_time)
    metrics = [
        Metric(name, value, at, int(row["step"])) for row in rows for name, value in numbers(row).items()
    ]
    settings = [Param(name, str(value)) for name, value in sorted((config or {}).items())]
    for start in range(0, max(len(metrics), 1), 1000):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + 1000], params=settings[:100])


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a training step's numbers by metric name; counts by reason become `name/reason`."""
    counts = {name: value for name, value in row.items() if isinstance(value, Mapping)}
    split = {f"{name}/{reason}": count for name, by in counts.items() for reason, count in by.items()}
    values = {name: value for name, value in row.items() if name != "step"} | split
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _upload(
    client: "MlflowClient",
    experiment: str,
    run_id: str,
    directory: Path,
    manifest: Manifest,
    tags: dict[str, str],
) -> str:
    query = f"tags.`graftwork.digest` = '{manifest.digest}' and source_run_id = '{run_id}'"
    earlier = client.search_logged_models([experiment], query, max_results=1)
    model = earlier[0] if earlier else client.create_logged_model(
        experiment, served_name(manifest.policy, manifest.digest).replace("@", "-"), run_id, tags
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        flavor.save_model(directory, Path(scratch) / "model", model.model_id, run_id)
        client.log_model_artifacts(model.model_id, str(Path(scratch) / "model"))
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)
