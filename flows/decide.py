"""The flows `promote`, `rollback`, `restore`, `hold`: a person decides, and the controller carries it out."""

from typing import Any

from prefect import flow

from engine.settings.forms import DecideForm, HoldForm, RestoreForm
from flows.entry import flow_settings
from tasks import steps
from tasks.progress import show_table, tag_run


@flow(name="promote", flow_run_name="promote {form.policy}@{form.digest}")
def promote(form: DecideForm) -> dict[str, Any]:
    """Make a revision the champion now, without a canary; refused for a tombstone or a refused probe."""
    return _decide("promote", form)


@flow(name="rollback", flow_run_name="rollback {form.policy}@{form.digest}")
def rollback(form: DecideForm) -> dict[str, Any]:
    """Roll a revision back: no new request reaches it until a person lifts its tombstone."""
    return _decide("rollback", form)


@flow(name="restore", flow_run_name="restore {form.policy}")
def restore(form: RestoreForm) -> dict[str, Any]:
    """Make an earlier revision the champion again; without a digest, the previous champion."""
    return _decide("restore", form)


@flow(name="hold", flow_run_name="hold {form.policy}")
def hold(form: HoldForm) -> dict[str, Any]:
    """End the policy's running release; its champion stays."""
    tag_run(f"policy:{form.policy}")
    ended = steps.hold(flow_settings(), form)
    show_table([ended], f"decision-{form.policy}", form.reason)
    steps.update_page(flow_settings(), form.policy, ended["revision"])
    return ended


def _decide(action: str, form: DecideForm | RestoreForm) -> dict[str, Any]:
    named = (f"revision:{form.policy}@{form.digest}",) if form.digest else ()
    tag_run(f"policy:{form.policy}", *named)
    params = flow_settings()
    decided = steps.decide(params, action, form)
    show_table([decided], f"decision-{form.policy}", form.reason)
    steps.update_page(params, form.policy, form.digest or decided["champion"])
    return decided
