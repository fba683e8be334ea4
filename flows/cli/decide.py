"""Commands for decisions: release, approve, hold, promote, restore, roll back, lift, freeze, thaw."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.catalog.records import served_name, split_served_name
from engine.errors import ConfigError
from engine.settings.forms import ApprovalForm, IfRunning, ReleaseForm
from flows.cli.backup import restore_from
from flows.entry import (
    PARAMS,
    By,
    ParamsFile,
    Reason,
    Revision,
    asked,
    check,
    enter,
    filled,
    is_in_catalog_alone,
    pinned,
    require_services,
)
from tasks.outcome import release_row

if TYPE_CHECKING:
    from engine.clients.controller import ControllerClient

app = typer.Typer()
PolicyArgument = Annotated[str, typer.Argument(help="Policy of the release.")]
# What the controller can be asked for, and the sentence that reports it.
DONE = {
    "promote": "{} is the champion.",
    "rollback": "{} is rolled back.",
    "lift": "The tombstone of {} is lifted.",
}


@app.command()
def release(
    revision: Annotated[
        str, typer.Argument(help="POLICY@DIGEST, or POLICY for its newest exported revision.")
    ],
    by: By = "cli",
    skip_score: Annotated[str | None, asked(ReleaseForm, "skip_score")] = None,
    skip_canary: Annotated[str | None, asked(ReleaseForm, "skip_canary")] = None,
    approval_s: Annotated[float | None, asked(ReleaseForm, "approval_s")] = None,
    if_running: Annotated[
        IfRunning, asked(ReleaseForm, "if_running", metavar="refuse|wait|replace")
    ] = "refuse",
    params: ParamsFile = PARAMS,
) -> None:
    """Release a revision: probe, score, canary, then promotion or rollback. Waits for the verdict."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    if not (skip_score and is_in_catalog_alone(settings, policy)):
        check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from flows.release import release as release_flow

    form = filled(
        ReleaseForm, policy=policy, digest=digest, by=by, skip_score=skip_score, skip_canary=skip_canary,
        approval_s=approval_s, if_running=if_running,
    )  # fmt: skip
    print_row(release_row(release_flow(form)))


@app.command()
def approve(policy: PolicyArgument, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Approve the policy's waiting release, so that its canary starts."""
    with reach(params) as controller:
        answer = filled(ApprovalForm, approve=True, by=by, reason=reason)
        controller.approve(controller.running_release(policy)["id"], reason, by)
    wake(policy, answer)
    typer.echo(f"The release of {policy} is approved.")


@app.command()
def hold(policy: PolicyArgument, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """End the policy's running release and keep its champion."""
    with reach(params) as controller:
        answer = filled(ApprovalForm, approve=False, by=by, reason=reason)
        controller.hold_running(policy, reason, by)
    wake(policy, answer)
    typer.echo(f"The release of {policy} is held.")


@app.command()
def promote(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Make a revision the champion now, without a canary. Refuses a revision with a tombstone."""
    decide("promote", revision, by, reason, params)


@app.command()
def restore(
    policy: Annotated[
        str | None,
        typer.Argument(help="POLICY for the previous champion, POLICY@DIGEST for that revision."),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Record this reason for the decision.")] = None,
    by: By = "cli",
    backup: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR|URL",
            help="Restore an installation from the newest backup there, or from DIR/backups/NAME.json.",
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="With --from: refuse a backup unless its manifest has this digest, whole or its first 12 "
            "digits or more.",
        ),
    ] = None,
    compare_with: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|URL",
            help="With --from: list what is undone since the backup, by the replaced installation's "
            "catalog.db, state directory or catalog URL.",
        ),
    ] = None,
    revoke_all_keys: Annotated[
        bool, typer.Option("--revoke-all-keys", help="With --from: let no key of the backup work.")
    ] = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Make an earlier revision the champion again; or, with --from, restore a whole backup.

    A backup is restored into an empty state directory. What was decided since it was made is undone, which is
    said first.
    """
    if backup is not None and policy is None:
        return restore_from(backup, params, expect, compare_with, revoke_all_keys)
    if expect is not None or compare_with is not None or revoke_all_keys:
        raise ConfigError(
            "--expect, --compare-with and --revoke-all-keys restore a backup: give --from DIR|URL with them, "
            "and no POLICY."
        )
    if backup is not None or policy is None or reason is None:
        raise ConfigError(
            "Give POLICY and --reason to restore a champion, or --from DIR|URL alone to restore a backup."
        )
    name, digest = split_served_name(policy)
    with reach(params) as controller:
        route = controller.restore(name, digest, reason, by)
    typer.echo(f"The champion is {served_name(name, route['champion'])}.")


@app.command()
def rollback(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Roll a revision back: write its tombstone, then the route.

    No new request reaches the revision until `graftwork lift`.
    """
    decide("rollback", revision, by, reason, params)


@app.command()
def lift(revision: Revision, by: By, reason: Reason, params: ParamsFile = PARAMS) -> None:
    """Lift a revision's tombstone, so that it may be released again."""
    decide("lift", revision, by, reason, params)


@app.command()
def freeze(reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Block promotions and canaries until `graftwork thaw`; rollbacks still work."""
    with reach(params) as controller:
        controller.freeze(reason, by)
    typer.echo("Releases are frozen: promotions and canaries are blocked, rollbacks still work.")


@app.command()
def thaw(reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Allow promotions and canaries again."""
    with reach(params) as controller:
        controller.thaw(reason, by)
    typer.echo("Releases are thawed: promotions and canaries are allowed again.")


def wake(policy: str, answer: ApprovalForm) -> None:
    """Resume flow runs that are suspended until this answer."""
    from tasks.approval import wake_waiting

    wake_waiting(policy, answer)


def decide(action: str, revision: str, by: str, reason: str, params: Path) -> None:
    """Ask the controller to carry out an action of `DONE` in a person's name, and report it."""
    policy, digest = pinned(revision)
    with reach(params) as controller:
        getattr(controller, action)(policy, digest, reason, by)
    typer.echo(DONE[action].format(revision))


def reach(params: Path) -> "ControllerClient":
    """Return a client of the running controller; works without Prefect and MLflow.

    Raises `ServiceError` where no services run.
    """
    settings = enter(params)
    require_services(settings)
    from tasks.release import controller

    return controller(settings)
