"""Asks a person to approve a release and its steps, through Prefect's Resume form.

The controller owns the gate: it holds the release when nobody answers in time, even without a flow run. This
module suspends the flow run until someone submits the form.
"""

from contextlib import suppress
from typing import Any

from engine.settings.forms import ApprovalForm
from engine.settings.params import Params
from tasks.progress import WaitsTable
from tasks.release import controller, longest_s

# The flow run waits longer than the gate, so a late form meets an ended release, not a failed run.
GRACE_S = 300.0


def ask_for_approvals(params: Params, release: dict[str, Any]) -> None:
    """Suspend the flow run before each step that needs an approval, and send the answer to the controller.

    Returns once the release has ended or has all its approvals. A run that no deployment started cannot be
    suspended; it goes on, and `graftwork decide approve` answers. Prefect restarts a suspended run from its
    beginning, so every earlier step is idempotent.
    """
    from prefect.flow_runs import suspend_flow_run
    from prefect.runtime import deployment

    settings, show = release["settings"], WaitsTable(release["policy"])
    last = max(settings.get("approval_weights") or [0.0])
    with controller(params) as client:
        while deployment.id:
            # After `graftwork decide approve` the release is past this step, also when this run is a restart.
            release = client.wait_for(
                release["id"], longest_s(release), "approval",
                lambda row: row["asks"] is not None or _has_all(row, last), show,
            )  # fmt: skip
            if release["asks"] is None:
                return
            # The whole time, also for a restarted run: the gate ends on the controller's clock.
            timeout_s = int(settings["approval_s"] + GRACE_S)
            # Each has a key of its own, under which a restarted run finds its answer.
            number = len(release["approvals"])
            key = f"approval-{number}" if number else "approval"
            answer: Any = suspend_flow_run(wait_for_input=ApprovalForm, timeout=timeout_s, key=key)
            decide = client.approve if answer.approve else client.hold
            decide(release["id"], answer.reason, answer.by)


def _has_all(release: dict[str, Any], last: float) -> bool:
    """Return whether no further approval can be asked for: that of the largest weight, `last`, is given."""
    given = [one["weight"] for one in release["approvals"] if "by" in one]
    return release["step"] in ("canary", "done") and max(given, default=0.0) >= last


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
