"""Release one revision: start it, show it, wait for its verdict."""

from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact

from engine.config import Params
from tasks import steps
from tasks.outcome import local_key, release_row


@flow(name="release", flow_run_name="release {policy}@{digest}")
def release(
    params: Params, policy: str, digest: str, by: str, skip_gates: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Release a revision through the controller's gates; return its row once it has ended.

    `skip_gates` maps a gate to the reason why it is skipped; the effect probe cannot be skipped.
    """
    started = steps.start_release(params, policy, digest, local_key(params), skip_gates or {}, by)
    create_link_artifact(
        f"{params.url('controller')}/releases/{started['id']}", "evidence so far", f"release-{policy}"
    )
    ended = steps.wait_for_verdict(params, started["id"])
    create_table_artifact([release_row(ended)], f"verdict-{policy}", ended["reason"])
    return ended
