"""Commands of people who decide: release, approve, hold, promote, restore, roll back, lift, freeze, thaw."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.settings.forms import ApprovalForm, ReleaseForm
from engine.settings.params import served_name, split_served_name
from flows.entry import (
    PARAMS,
    By,
    ParamsFile,
    Reason,
    Revision,
    check,
    enter,
    filled,
    pinned,
    require_services,
)
from tasks.outcome import release_row

if TYPE_CHECKING:
    from engine.clients.controller import ControllerClient

app = typer.Typer()


@app.command()
def release(
    revision: Annotated[
        str, typer.Argument(help="POLICY@DIGEST, or POLICY for its newest exported revision.")
    ],
    by: By = "cli",
    skip_score: Annotated[str | None, typer.Option(help="Skip the offline score, for this reason.")] = None,
    skip_canary: Annotated[str | None, typer.Option(help="Skip the canary, for this reason.")] = None,
    approval_hours: Annotated[
        float | None, typer.Option(help="A person must approve within this; 0: nobody.")
    ] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Release a revision: probe, score, canary, then promotion or rollback; wait for the verdict."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from flows.release import release as release_flow

    form = filled(
        ReleaseForm, policy=policy, digest=digest, by=by, skip_score=skip_score, skip_canary=skip_canary,
        approval_hours=approval_hours,
    )  # fmt: skip
    print_row(release_row(release_flow(form)))


@app.command()
def approve(policy: str, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Let the policy's release that waits for approval go to users."""
    with reach(params) as controller:
        answer = filled(ApprovalForm, approve=True, by=by, reason=reason)
        controller.approve(controller.running_release(policy)["id"], reason, by)
    wake(policy, answer)
    typer.echo(f"The release of {policy} goes on.")


@app.command()
def hold(policy: str, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """End the policy's running release; its champion stays."""
    with reach(params) as controller:
        answer = filled(ApprovalForm, approve=False, by=by, reason=reason)
        controller.hold_running(policy, reason, by)
    wake(policy, answer)
    typer.echo(f"The release of {policy} is held.")


@app.command()
def promote(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Make a revision the champion now, without a canary; never against a tombstone."""
    decide("promote", revision, by, reason, params)


@app.command()
def restore(
    policy: Annotated[str, typer.Argument(help="POLICY: the champion before; POLICY@DIGEST: that one.")],
    reason: Reason,
    by: By = "cli",
    params: ParamsFile = PARAMS,
) -> None:
    """Put an earlier revision back as champion."""
    name, digest = split_served_name(policy)
    with reach(params) as controller:
        route = controller.restore(name, digest, reason, by)
    typer.echo(f"The champion is {served_name(name, route['champion'])}.")


@app.command()
def rollback(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Bury a revision: no new request reaches it until somebody lifts it."""
    decide("rollback", revision, by, reason, params)


@app.command()
def lift(revision: Revision, by: By, reason: Reason, params: ParamsFile = PARAMS) -> None:
    """Lift a revision's tombstone, with a name and a reason."""
    decide("lift", revision, by, reason, params)


@app.command()
def freeze(reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Let no pointer move but rollbacks, until `graftwork thaw`."""
    with reach(params) as controller:
        controller.freeze(reason, by)
    typer.echo("Frozen: only rollbacks move a pointer now.")


@app.command()
def thaw(reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Let pointers move again."""
    with reach(params) as controller:
        controller.thaw(reason, by)
    typer.echo("Thawed: pointers may move again.")


def wake(policy: str, answer: ApprovalForm) -> None:
    """Let flow runs that sleep until this answer go on."""
    from tasks.approval import wake_waiting

    wake_waiting(policy, answer)


def decide(action: str, revision: str, by: str, reason: str, params: Path) -> None:
    """Ask the controller to promote, roll back or lift, in a person's name."""
    policy, digest = pinned(revision)
    with reach(params) as controller:
        getattr(controller, action)(policy, digest, reason, by)
    typer.echo(f"{action} of {revision}: done.")


def reach(params: Path) -> "ControllerClient":
    """Return a client of the controller that runs; neither Prefect nor MLflow is needed."""
    settings = enter(params)
    require_services(settings)
    from tasks.release import controller

    return controller(settings)
