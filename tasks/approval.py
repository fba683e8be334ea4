"""Asks a person to approve a release, through Prefect's Resume form.

The controller owns the gate: it holds the release when nobody answers in time, even without a flow run. This
module suspends the flow run until someone submits the form.
"""

from contextlib import suppress
from typing import Any

from engine.settings.forms import ApprovalForm
from engine.settings.params import Params
from tasks.release import controller

# The flow run waits longer than the gate, so a late form meets an ended release, not a failed run.
GRACE_S = 300.0


def ask_for_approval(params: Params, release_id: str) -> None:
    """Suspend the flow run at the approval gate, then send the answer to the controller.

    A run that no deployment started cannot be suspended; it goes on, and `graftwork decide approve` answers.
    Prefect restarts a suspended run from its beginning, so every earlier step is idempotent.
    """
    from prefect.flow_runs import suspend_flow_run
    from prefect.runtime import deployment

    # After `graftwork decide approve` the release is past this step, also when this run is a restart.
    with controller(params) as client:
        release = client.wait_for_step(release_id, "approval", 120)
        if release["state"] != "running" or release["step"] != "approval" or not deployment.id:
            return
        # The whole time, also for a restarted run: the gate ends on the controller's clock, not on this one.
        longest_s = int(release["settings"]["approval_s"] + GRACE_S)
        answer: Any = suspend_flow_run(wait_for_input=ApprovalForm, timeout=longest_s, key="approval")
        decide = client.approve if answer.approve else client.hold
        decide(release_id, answer.reason, answer.by)


def wake_waiting(policy: str, answer: ApprovalForm) -> int:
    """Resume the suspended flow runs that wait for an approval of `policy`; return their number.

    The controller has the answer already, so a run that cannot be reached only stays suspended longer.
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
