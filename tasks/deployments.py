"""Installs the work pool, the deployments of tasks/prefect.yaml and the automations in Prefect.

Idempotent: everything is found by its name and replaced.
"""

import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from engine.errors import ServiceError
from engine.services.lifecycle import WORK_POOL
from engine.settings.params import Params
from tasks.notifications import TEMPLATES, automation_of, bad_news, of_webhook

if TYPE_CHECKING:
    from prefect.automations import AutomationCore
    from prefect.client.orchestration import SyncPrefectClient

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
# A run counts as dead after three missed heartbeats (engine/services/lifecycle.py).
SILENCE_S = 100
ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended")


def install(params: Params) -> int:
    """Install pool, deployments and automations; return the number of deployments.

    Raises `ServiceError` when Prefect's server refuses them or does not answer.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    deployments = yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]
    try:
        with get_client(sync_client=True) as client:
            _install_pool(client)
            for wanted in deployments:
                _deploy(params, wanted)
            for automation in (bad_news(params), _dead_runs()):
                _replace(client, automation.name, automation)
            for webhook in TEMPLATES:
                _replace(client, automation_of(webhook), of_webhook(webhook))
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise ServiceError(
            f"Prefect at {params.url('prefect')} refused the deployments: {error}. "
            f"Check {params.paths.logs}/prefect.log, then run `graftwork up` again."
        ) from None
    return len(deployments)


def job_template(folder: Path) -> dict[str, Any]:
    """Return what a run is given: it takes no command, environment or folder from its caller.

    The worker starts `flows.flow_run` by this interpreter: it has it at the same path, as it has the folder.
    Prefect would merge the caller's variables into an `env` given here, even an empty one. In `folder` are a
    person's own modules. By default it would be a temporary directory of the run: the first process of a
    suspended run removes that when it ends, and the resumed one may run in it already.
    """
    return {
        "job_configuration": {
            "command": shlex.join([sys.executable, "-m", "flows.flow_run"]), "labels": {}, "name": None,
            "stream_output": True, "working_dir": str(folder),
        },
        # Others are ignored, not refused: Prefect keeps those of a deployment of an earlier version.
        "variables": {"type": "object", "properties": {}},
    }  # fmt: skip


def _install_pool(client: "SyncPrefectClient") -> None:
    """Create the work pool, or give it the fixed template."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    # As for the services: where `graftwork up` was started.
    template = job_template(Path.cwd())
    try:
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
    except ObjectAlreadyExists:
        client.update_work_pool(WORK_POOL, WorkPoolUpdate(base_job_template=template))


def _deploy(params: Params, wanted: dict[str, Any]) -> None:
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.deployments.runner import RunnerDeployment
    from prefect.schedules import Cron

    limit = wanted.get("concurrency_limit")
    nightly = wanted["name"] == "nightly"
    deployment = RunnerDeployment.from_entrypoint(
        wanted["entrypoint"],
        wanted["name"],
        description=wanted["description"],
        tags=wanted["tags"],
        parameters=wanted.get("parameters"),
        concurrency_limit=ConcurrencyLimitConfig(**limit) if limit else None,
        schedule=Cron(params.nightly.cron, timezone=params.nightly.timezone) if nightly else None,
        work_pool_name=WORK_POOL,
        work_queue_name=wanted["work_pool"]["work_queue_name"],
    )
    deployment.apply(work_pool_name=WORK_POOL)


def _dead_runs() -> "AutomationCore":
    from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType

    beat = "prefect.flow-run.heartbeat"
    return AutomationCore(
        name="graftwork: dead runs",
        description="Marks a run as crashed when its heartbeats stop.",
        trigger=EventTrigger(
            after={beat},
            expect={beat, *(f"prefect.flow-run.{end}" for end in ENDS)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENCE_S),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, message="The run's process is gone; start it again.")
        ],
    )


def _replace(client: "SyncPrefectClient", name: str, automation: "AutomationCore | None") -> None:
    """Create an automation in the place of others of its name; with None only remove those.

    One that is the same stays: it has heard the last heartbeat of runs that died a moment ago.
    """
    known = client.read_automations_by_name(name)
    wanted = [automation.model_dump()] if automation else []
    if [one.model_dump(exclude={"id"}) for one in known] == wanted:
        return
    for one in known:
        client.delete_automation(one.id)
    if automation:
        client.create_automation(automation)
