"""The flow `release`: start a release, ask for approvals if configured, wait for its verdict."""

from typing import Any

from prefect import flow

from engine.catalog.records import served_name
from engine.settings.forms import RELEASE_TAG, ReleaseForm
from engine.settings.params import Params
from flows.entry import flow_settings
from tasks import steps
from tasks.approval import ask_for_approvals
from tasks.outcome import release_row
from tasks.progress import show_link, show_table, tag_run


@flow(name="release", flow_run_name="release {form.policy}")
def release(form: ReleaseForm) -> dict[str, Any]:
    """Release a revision through the controller's gates; return its row once it has ended."""
    params = flow_settings()
    return follow(params, steps.start_release(params, form))


def follow(params: Params, started: dict[str, Any]) -> dict[str, Any]:
    """Ask for a started release's approvals if configured, wait for its verdict, and return its row."""
    policy = started["policy"]
    tag_run(
        f"policy:{policy}",
        f"revision:{served_name(policy, started['revision'])}",
        f"{RELEASE_TAG}{started['id']}",
    )
    page = f"{params.url('controller')}/releases/{started['id']}"
    show_link(page, "evidence so far", f"release-{policy}")
    if started["settings"]["approval_s"]:
        ask_for_approvals(params, started)
    ended = steps.wait_for_verdict(params, started)
    show_table([release_row(ended)], f"verdict-{policy}", ended["reason"])
    steps.update_page(params, policy, ended["revision"])
    return ended
