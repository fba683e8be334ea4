"""Commands of people who decide: release, promote, roll back, lift."""

from pathlib import Path
from typing import Annotated

import typer

from engine.config import ReleaseForm
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

app = typer.Typer()


@app.command()
def release(
    revision: Revision,
    by: By = "cli",
    skip_score: Annotated[str | None, typer.Option(help="Skip the offline score, for this reason.")] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Release a revision: probe, score, canary, then promotion or rollback; wait for the verdict."""
    settings = enter(params)
    policy, digest = pinned(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from flows.release import release as release_flow
    from tasks.outcome import release_row

    form = filled(ReleaseForm, policy=policy, digest=digest, by=by, skip_score=skip_score)
    print_row(release_row(release_flow(form)))


@app.command()
def promote(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Make a revision the champion now, without a canary; never against a tombstone."""
    decide("promote", revision, by, reason, params)


@app.command()
def rollback(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Bury a revision: no new request reaches it until somebody lifts it."""
    decide("rollback", revision, by, reason, params)


@app.command()
def lift(revision: Revision, by: By, reason: Reason, params: ParamsFile = PARAMS) -> None:
    """Lift a revision's tombstone, with a name and a reason."""
    decide("lift", revision, by, reason, params)


def decide(action: str, revision: str, by: str, reason: str, params: Path) -> None:
    """Ask the controller to promote, roll back or lift, in a person's name."""
    settings = enter(params)
    policy, digest = pinned(revision)
    require_services(settings)
    from tasks import release as controller
    from tasks.outcome import local_key

    ask = {"promote": controller.promote, "rollback": controller.rollback, "lift": controller.lift}[action]
    ask(settings.url("controller"), local_key(settings), policy, digest, reason, by)
    typer.echo(f"{action} of {revision}: done.")
