"""Asking a person before users see a revision, through Prefect's Resume form.

The gate itself is the controller's: it holds the release when nobody has answered in time, also when
no flow run waits. Here a flow run goes to sleep until somebody fills the form in.
"""

import time
from contextlib import suppress
from typing import Any

from engine.settings.forms import ApprovalForm
from engine.settings.params import Params
from tasks.release import controller

# A form that comes in at the last moment finds the release ended, not the flow run failed.
GRACE_S = 300.0


def ask_for_approval(params: Params, release_id: str) -> None:
    """Suspend the flow run at the approval gate and pass the answer on.

    A run that no deployment started cannot sleep; it goes on, and `graftwork approve` answers.
    The suspended run is started again from its beginning: each step before finds what is done.
    """
    from prefect.flow_runs import suspend_flow_run
    from prefect.runtime import deployment

    # One that `graftwork approve` has let go on is past the step, also before this run was started again.
    with controller(params) as client:
        release = client.wait_for_step(release_id, "approval", 120)
        if release["state"] != "running" or release["step"] != "approval" or not deployment.id:
            return
        left_s = release["updated_at"] + release["settings"]["approval_s"] - time.time()
        answer: Any = suspend_flow_run(
            wait_for_input=ApprovalForm, timeout=int(max(0, left_s) + GRACE_S), key="approval"
        )
        decide = client.approve if answer.approve else client.hold
        decide(release_id, answer.reason, answer.by)


def wake_waiting(policy: str, answer: ApprovalForm) -> int:
    """Resume the flow runs that sleep until somebody answers for `policy`; return how many there were.

    The controller has the answer already: a run that cannot be reached now only sleeps longer.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    waiting = {"state": {"name": {"any_": ["Suspended"]}}, "tags": {"all_": [f"policy:{policy}"]}}
    woken = 0
    with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting)):
            client.resume_flow_run(run.id, run_input=answer.model_dump(mode="json"))
            woken += 1
    return woken
