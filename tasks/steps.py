"""The Prefect tasks; each is a plain function of this package, which works without Prefect, or wraps one.

Imports are deferred: importing a flow must not import torch, MLflow or lm-eval. Prefect caches only the start
of a release. The other steps are idempotent by the revision's digest.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from engine.catalog.records import served_name
from engine.errors import ServiceError
from engine.settings.forms import CreatePolicyForm, DecideForm, ReleaseForm, RestoreForm, RunningForm
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from tasks import nightly, publish
from tasks import release as plain_release
from tasks import verify as verification
from tasks.progress import WaitsTable, both, log_collapse

if TYPE_CHECKING:
    from engine.quality.regression import Target
    from engine.training.loop import Trained
    from tasks.general import Perplexity
    from tasks.part_score import PartScore
    from tasks.score import Score

verify = task(name="verify", task_run_name="verify {policy}", cache_policy=NO_CACHE)(verification.verify)
due_policies = task(name="due policies", cache_policy=NO_CACHE)(nightly.due_policies)
write_report = task(name="write report", cache_policy=NO_CACHE)(publish.write_report)
OnStep = Callable[[Mapping[str, Any]], None]
LAZY = (
    "transformers:PreTrainedTokenizerFast",
    "openai:AsyncOpenAI",
    "lm_eval.evaluator",
    "lm_eval.models.openai_completions",
    "mlflow:MlflowClient",
    "tasks.part_score",
    "tasks.recheck",
    "tasks.register",
    "tasks.score",
    "engine.training.loop",
)


def preload() -> None:
    """Import the tasks' heavy modules before two threads import them at once.

    Packages with lazy imports, such as transformers, are not safe for concurrent imports.
    """
    for name in LAZY:
        module, _, attribute = name.partition(":")
        loaded = importlib.import_module(module)
        if attribute:
            getattr(loaded, attribute)


def flush() -> None:
    """Send Prefect's buffered logs and events before its server stops."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=5)
    EventsWorker.drain_all(timeout=5)


@task(name="train", task_run_name="train {policy}", cache_policy=NO_CACHE)
def train(params: Params, policy: str, config: PolicyConfig, key: str, on_step: OnStep) -> "Trained":
    """Train a policy on the resident base and export its revision."""
    from engine.training import loop
    from engine.training.several_engines import Engines
    from tasks.tracking import Tracking

    with Tracking(params.url("mlflow"), policy) as track:
        return loop.train(params, policy, config, key, both(on_step, both(track, log_collapse)), Engines.of)


@task(name="register", task_run_name="register {policy}", cache_policy=NO_CACHE)
def register(params: Params, policy: str, directory: Path, curve: Sequence[Mapping[str, Any]]) -> int:
    """Register an exported revision in MLflow; a retry continues from its directory."""
    from tasks import register as plain

    return plain.register(params, policy, directory, curve)


@task(name="score", task_run_name="score {policy}", cache_policy=NO_CACHE)
def score(
    params: Params, policy: str, digest: str | None, suite: str, key: str,
    against: Sequence["Score | None"] = (),
) -> "Score":  # fmt: skip
    """Score a revision or the base on a frozen suite through the live engine, and compare it with others."""
    from tasks import score as plain

    found = plain.score(params, policy, digest, suite, key)
    for other in against:
        if other:
            plain.compare(params, found, other)
    return found


@task(name="score general", task_run_name="score general text of {policy}", cache_policy=NO_CACHE)
def score_general(params: Params, policy: str, digest: str, key: str) -> "list[Perplexity]":
    """Measure the perplexities of the base and of a revision on general text."""
    from tasks import general as plain

    return [plain.score_general(params, policy, one, key) for one in (None, digest)]


@task(name="score champion", task_run_name="score champion of {policy}", cache_policy=NO_CACHE)
def score_champion(params: Params, policy: str, digest: str, suite: str, key: str) -> "Score | None":
    """Score the champion, the baseline of a release of `digest`, on the suite's current version, if any."""
    from tasks import part_score as plain

    return plain.score_champion(params, policy, digest, suite, key)


@task(name="score part", task_run_name="score part of {policy}", cache_policy=NO_CACHE)
def score_part(
    params: Params, policy: str, digest: str, baseline: "Score", key: str, target: "Target"
) -> "PartScore":
    """Score a revision on as many items as show whether it has fallen below its baseline."""
    from tasks import part_score as plain

    made_at = plain.made_at(params, policy, digest)
    return plain.score_part(params, policy, digest, baseline, key, target, made_at)


@task(name="score kept", task_run_name="score what {policy} keeps", cache_policy=NO_CACHE)
def score_kept(params: Params, policy: str, digest: str, suite: str, key: str) -> None:
    """Score the base, the champion and a revision on the suite that the policy keeps, in one pass."""
    from tasks import score as plain
    from tasks.part_score import champion_beside

    wanted = dict.fromkeys((None, champion_beside(params, policy, digest), digest))
    *others, revision = plain.scores(params, [(policy, one) for one in wanted], suite, key)
    for other in others:
        plain.compare(params, revision, other)


@task(name="recheck", task_run_name="recheck {policy}", cache_policy=NO_CACHE)
def recheck(params: Params, policy: str, key: str) -> str:
    """Look at a policy's champion again; return what came of it in a sentence."""
    from tasks import recheck as plain

    found = plain.recheck(params, policy, key, "nightly")
    return f"{found['state']}: {found['reason']}"


@task(name="update page", task_run_name="update page of {policy}", cache_policy=NO_CACHE)
def update_page(params: Params, policy: str, digest: str) -> str:
    """Refresh the version's page in MLflow; a registry that is down does not fail the run."""
    from tasks import version_page as plain

    try:
        plain.update(params, policy, digest, since=time.time())
    except ServiceError as error:
        return str(error)
    return "updated"


def _once_a_run(context: TaskRunContext, _parameters: Mapping[str, Any]) -> str:
    # A suspended run restarts from its beginning; it must not start a second release.
    return f"start-release-{context.task_run.flow_run_id}"


start_release = task(
    name="start release",
    task_run_name="start release of {form.policy}",
    cache_key_fn=_once_a_run,
    persist_result=True,
)(plain_release.start_release)


@task(name="wait for verdict", cache_policy=NO_CACHE)
def wait_for_verdict(params: Params, release: dict[str, Any]) -> dict[str, Any]:
    """Return the release once it has ended; it advances whether or not anything waits for it."""
    with plain_release.controller(params) as controller:
        show = WaitsTable(release["policy"])
        return controller.wait_for_verdict(release["id"], plain_release.longest_s(release), show)


@task(name="decide", task_run_name="{action} {form.policy}", cache_policy=NO_CACHE)
def decide(params: Params, action: str, form: DecideForm | RunningForm | RestoreForm) -> dict[str, Any]:
    """Decide in a person's name about a revision or a running release; return the route, or the release."""
    with plain_release.controller(params) as controller:
        if isinstance(form, RunningForm):
            return controller.decide_running(action, form.policy, form.reason, form.by)
        return controller.decide(action, form.reason, form.by, policy=form.policy, digest=form.digest)


@task(name="create policy", task_run_name="create {form.name}", cache_policy=NO_CACHE)
def create_policy(params: Params, form: CreatePolicyForm) -> dict[str, Any]:
    """Split the data into training and frozen items, write the suite, register the policy."""
    from tasks import policies as plain

    created = plain.create_policy(
        params, form.name, form.data, form.verifier, form.owner, form.base, form.settings(), form.items,
        reuse_name=form.again,
    )  # fmt: skip
    return asdict(created)


@task(name="release in background", cache_policy=NO_CACHE)
def release_in_background(params: Params, policy: str, digest: str) -> str:
    """Start the `release` deployment for a revision with an accepted probe, without waiting for it."""
    from prefect.deployments import run_deployment

    from engine.catalog.opening import open_catalog

    with open_catalog(params.paths) as catalog:
        probe = catalog.revisions.get(policy, digest).probe or {}
    if not probe.get("accepted"):
        return f"not released: the effect probe refused {served_name(policy, digest)}"
    form = ReleaseForm(policy=policy, digest=digest, by="nightly")
    fields = form.model_dump(mode="json", exclude_unset=True)
    run_deployment("release/release", parameters={"form": fields}, timeout=0, as_subflow=False)
    return f"release of {served_name(policy, digest)} started"
