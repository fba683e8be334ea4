"""Commands for decisions: release a revision, roll one back, decide on releases and the champion."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.catalog.records import served_name, split_served_name
from engine.errors import ConfigError
from engine.services import lifecycle as services
from engine.settings.forms import ApprovalForm, IfRunning, ReleaseForm
from flows.entry import (
    PARAMS,
    By,
    Json,
    ParamsFile,
    Reason,
    Revision,
    check,
    enter,
    filled,
    is_in_catalog_alone,
    option,
    pinned,
    print_done,
    print_json,
)
from tasks.outcome import local_key, release_json, release_row

if TYPE_CHECKING:
    from engine.clients.controller import ControllerClient

app = typer.Typer()
Decision = Literal["approve", "pause", "resume", "hold", "promote", "restore", "freeze", "thaw"]
# Of them, those about a policy's running release.
RUNNING = ("approve", "pause", "resume", "hold")
# The sentence that reports a decision.
DONE = {
    "approve": "The release of {} is approved.",
    "pause": "The release of {} is paused.",
    "resume": "The release of {} goes on.",
    "hold": "The release of {} is held.",
    "promote": "{} is the champion.",
    "restore": "The champion is {}.",
    "freeze": "Releases are frozen: promotions and canaries are blocked, rollbacks still work.",
    "thaw": "Releases are thawed: promotions and canaries are allowed again.",
}


@app.command()
def release(
    revision: Annotated[
        str, typer.Argument(help="POLICY@DIGEST, or POLICY for its newest exported revision.")
    ],
    by: By = "cli",
    skip_score: Annotated[str | None, option(ReleaseForm, "skip_score")] = None,
    skip_shadow: Annotated[str | None, option(ReleaseForm, "skip_shadow")] = None,
    skip_canary: Annotated[str | None, option(ReleaseForm, "skip_canary")] = None,
    approval_s: Annotated[float | None, option(ReleaseForm, "approval_s")] = None,
    if_running: Annotated[
        IfRunning, option(ReleaseForm, "if_running", metavar="refuse|wait|replace")
    ] = "refuse",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Release a revision: probe, score, canary, then promotion or rollback. Waits for the verdict."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    if not (skip_score and is_in_catalog_alone(settings, policy)):
        check(settings, [policy])
    services.require_running(settings)
    from flows.display import print_row, progress_apart
    from flows.release import release as release_flow

    form = filled(
        ReleaseForm, policy=policy, digest=digest, by=by, skip_score=skip_score, skip_shadow=skip_shadow,
        skip_canary=skip_canary, approval_s=approval_s, if_running=if_running,
    )  # fmt: skip
    with progress_apart(as_json):
        ended = release_flow(form)
    print_json(release_json(ended)) if as_json else print_row(release_row(ended))


@app.command()
def rollback(
    revision: Revision,
    reason: Reason,
    lift: Annotated[
        bool, typer.Option("--lift", help="Lift its tombstone instead, so that it may be released again.")
    ] = False,
    by: By = "cli",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Roll a revision back: write its tombstone, then the route.

    No new request reaches the revision until a person lifts the tombstone: --lift, with --by.
    """
    if lift and by == "cli":
        raise ConfigError("A person lifts a tombstone: give your name with --by.")
    policy, digest = pinned(revision)
    with reach(params) as controller:
        controller.decide("lift" if lift else "rollback", reason, by, policy=policy, digest=digest)
    done = f"The tombstone of {revision} is lifted." if lift else f"{revision} is rolled back."
    print_done(as_json, done, revision=revision, by=by, reason=reason)


@app.command()
def recheck(
    policy: Annotated[str, typer.Argument(help="The policy.")],
    by: By = "cli",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Look at a policy's champion again beside its predecessor, as the nightly run does.

    Where the suite, verifier, tokenizer, template, engine or code has changed since the last look, or that is
    long ago, score both. A champion that has lost raises an alarm, or is rolled back (setting `recheck`).
    """
    settings = enter(params)
    check(settings, [policy])
    services.require_running(settings)
    from flows.display import print_row
    from tasks.recheck import recheck as look_again

    found = look_again(settings, policy, local_key(settings), by)
    print_json(found) if as_json else print_row(found)


@app.command()
def decide(
    decision: Annotated[
        Decision,
        typer.Argument(
            metavar="approve|pause|resume|hold|promote|restore|freeze|thaw", help="Your decision."
        ),
    ],
    reason: Reason,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[SUBJECT]", help="The policy or revision; none for freeze and thaw."),
    ] = None,
    by: By = "cli",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Decide about a running release, the champion or all releases, in your name.

    approve POLICY: the policy's waiting release starts its canary, or takes its next step. pause POLICY: its
    running release stays where it is and its time stands, until resume; harm still rolls it back. hold
    POLICY: its running release ends, and its champion stays. promote POLICY@DIGEST: the revision is the
    champion now, without a canary; one with a tombstone is refused. restore POLICY: the previous champion is
    the champion again; POLICY@DIGEST: that earlier revision. freeze: promotions and canaries are blocked
    until thaw; rollbacks still work.
    """
    if (subject is None) != (decision in ("freeze", "thaw")):
        raise ConfigError(
            "Name a policy or revision to approve, pause, resume, hold, promote or restore; freeze and thaw "
            "take none."
        )
    name, digest = split_served_name(subject or "")
    if decision == "promote":
        pinned(str(subject))
    if decision in RUNNING and digest:
        raise ConfigError(f"A policy has one release at a time. Name the policy alone: {name}.")
    with reach(params) as controller:
        match decision:
            case "approve" | "hold":
                answer = filled(ApprovalForm, approve=decision == "approve", by=by, reason=reason)
                controller.decide_running(decision, name, reason, by)
                from tasks.approval import wake_waiting

                wake_waiting(name, answer)
            case "pause" | "resume":
                controller.decide_running(decision, name, reason, by)
            case "freeze" | "thaw":
                controller.decide(decision, reason, by)
            case _:
                route = controller.decide(decision, reason, by, policy=name, digest=digest)
                subject = served_name(name, route["champion"]) if decision == "restore" else subject
    print_done(as_json, DONE[decision].format(subject), subject=subject, by=by, reason=reason)


def reach(params: Path) -> "ControllerClient":
    """Return a client of the running controller; works without Prefect and MLflow.

    Raises `ServiceError` where no services run.
    """
    settings = enter(params)
    services.require_running(settings)
    from tasks.release import controller

    return controller(settings)
