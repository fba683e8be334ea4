"""The Prefect tasks: each decorates a plain function of this package that works without Prefect.

Imports inside: a flow that is only looked at must not bring in torch, MLflow or lm-eval. Nothing is
cached by Prefect; a step that is run again finds what its first run has done, by the revision's digest.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.config import Params, PolicyConfig

if TYPE_CHECKING:
    from tasks.score import Score
    from tasks.train import Trained

OnStep = Callable[[Mapping[str, Any]], None]
LAZY = (
    "transformers:AutoTokenizer",
    "openai:AsyncOpenAI",
    "lm_eval.evaluator",
    "lm_eval.models.openai_completions",
    "mlflow:MlflowClient",
    "tasks.register",
    "tasks.score",
    "tasks.train",
)


def preload() -> None:
    """Import what the tasks import, before two of them do so in two threads at once.

    Packages that import lazily, transformers among them, break when two threads meet in them.
    """
    for name in LAZY:
        module, _, attribute = name.partition(":")
        loaded = importlib.import_module(module)
        if attribute:
            getattr(loaded, attribute)


def flush() -> None:
    """Send what Prefect still holds of logs and events, before its server stops."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=5)
    EventsWorker.drain_all(timeout=5)


@task(name="train", task_run_name="train {policy}", tags=["trainer", "engine"], cache_policy=NO_CACHE)
def train(params: Params, policy: str, config: PolicyConfig, key: str, on_step: OnStep) -> "Trained":
    """Train a policy by GRPO on the resident base, and export its revision."""
    from tasks import train as plain

    return plain.train(params, policy, config, key, on_step)


@task(name="register", task_run_name="register {policy}", tags=["mlflow"], cache_policy=NO_CACHE)
def register(params: Params, policy: str, directory: Path, curve: Sequence[Mapping[str, Any]]) -> int:
    """Register an exported revision in MLflow; a retry goes on from the directory."""
    from tasks import register as plain

    return plain.register(params, policy, directory, curve)


@task(name="verify", task_run_name="verify {policy}", tags=["engine"], cache_policy=NO_CACHE)
def verify(params: Params, policy: str, digest: str, key: str) -> Mapping[str, Any]:
    """Ask the engine for the log-probabilities that the trainer shipped with the revision."""
    from tasks import verify as plain

    return plain.verify(params, policy, digest, key)


@task(name="score", task_run_name="score {policy}", tags=["engine", "lm-eval"], cache_policy=NO_CACHE)
def score(params: Params, policy: str, digest: str | None, suite: str, key: str) -> "Score":
    """Score a revision, or the base, on a frozen suite through the live engine."""
    from tasks import score as plain

    return plain.score(params, policy, digest, suite, key)


@task(
    name="start release",
    task_run_name="start release of {policy}",
    tags=["controller"],
    cache_policy=NO_CACHE,
)
def start_release(
    params: Params, policy: str, digest: str, key: str, skip_gates: Mapping[str, str], by: str
) -> dict[str, Any]:
    """Ask the controller for a release; a second request finds the first one's release."""
    from tasks import release as plain

    url = params.url("controller")
    return plain.start_release(url, key, policy, digest, skip_gates=dict(skip_gates), by=by)


@task(name="wait for verdict", tags=["controller"], cache_policy=NO_CACHE)
def wait_for_verdict(params: Params, release_id: str) -> dict[str, Any]:
    """Return the release once it has ended; it goes on by itself if nobody waits."""
    from tasks import release as plain

    # The controller ends a canary by itself at max_seconds; the rest is for the gates before it.
    return plain.wait_for_verdict(params.url("controller"), release_id, params.release.max_seconds + 60)


@task(name="write report", tags=["ledger"], cache_policy=NO_CACHE)
def write_report(params: Params, path: Path, since: float, now: float, stages: Mapping[str, float]) -> Path:
    """Write the HTML report of all policies; it opens offline."""
    from tasks import publish as plain

    return plain.write_report(params, path, since, now, stages)
