"""Flows of decisions in a person's name: promote, roll back, restore, hold, pause and resume."""

from typing import Any

from prefect import flow

from engine.settings.forms import DecideForm, RestoreForm, RunningForm
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
def hold(form: RunningForm) -> dict[str, Any]:
    """End the policy's running release; its champion stays."""
    return _decide("hold", form)


@flow(name="pause", flow_run_name="pause {form.policy}")
def pause(form: RunningForm) -> dict[str, Any]:
    """Leave the policy's running release where it is, its time too; harm still rolls it back."""
    return _decide("pause", form)


@flow(name="resume", flow_run_name="resume {form.policy}")
def resume(form: RunningForm) -> dict[str, Any]:
    """Have the policy's paused release go on."""
    return _decide("resume", form)


def _decide(action: str, form: DecideForm | RunningForm | RestoreForm) -> dict[str, Any]:
    digest = None if isinstance(form, RunningForm) else form.digest
    tag_run(f"policy:{form.policy}", *([f"revision:{form.policy}@{digest}"] if digest else []))
    params = flow_settings()
    decided = steps.decide(params, action, form)
    show_table([decided], f"decision-{form.policy}", form.reason)
    told = "revision" if isinstance(form, RunningForm) else "champion"
    steps.update_page(params, form.policy, digest or decided[told])
    return decided
