"""Commands about policies: create one from your own data, show and try it, remove it for good."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine.base.fitting import fitted_policy
from engine.errors import ConfigError
from engine.settings.forms import CreatePolicyForm
from flows.cli.store import KEEP
from flows.entry import (
    PARAMS,
    By,
    Json,
    ParamsFile,
    Reason,
    ReuseName,
    enter,
    filled,
    option,
    print_json,
    print_result,
)
from tasks.outcome import local_key

app = typer.Typer()
policy_app = typer.Typer(help="Policies: lines of training, each with its task.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")


@policy_app.command("create")
def create(
    name: str,
    data: Annotated[
        Path,
        typer.Option(
            help="Questions and answers, example chats, or pairs of answers: JSON lines, JSON, CSV, "
            "Parquet or a saved dataset."
        ),
    ],
    method: Annotated[str | None, option(CreatePolicyForm, "method")] = None,
    verifier: Annotated[str | None, option(CreatePolicyForm, "verifier")] = None,
    start: Annotated[str | None, option(CreatePolicyForm, "start", "--from")] = None,
    epochs: Annotated[int | None, option(CreatePolicyForm, "epochs")] = None,
    owner: Annotated[str, option(CreatePolicyForm, "owner")] = "local",
    base: Annotated[str | None, option(CreatePolicyForm, "base")] = None,
    system: Annotated[str | None, option(CreatePolicyForm, "system")] = None,
    few_shot: Annotated[
        Path | None, typer.Option(help="Put the worked examples in this file before every question.")
    ] = None,
    steps: Annotated[int | None, option(CreatePolicyForm, "steps")] = None,
    lr: Annotated[float | None, option(CreatePolicyForm, "lr")] = None,
    loss: Annotated[str | None, option(CreatePolicyForm, "loss")] = None,
    kl: Annotated[float | None, option(CreatePolicyForm, "kl")] = None,
    rank: Annotated[int | None, option(CreatePolicyForm, "rank")] = None,
    groups: Annotated[int | None, option(CreatePolicyForm, "groups")] = None,
    group_size: Annotated[int | None, option(CreatePolicyForm, "group_size")] = None,
    max_tokens: Annotated[int | None, option(CreatePolicyForm, "max_tokens")] = None,
    items: Annotated[int, option(CreatePolicyForm, "items")] = 200,
    scheduled: Annotated[
        bool | None, option(CreatePolicyForm, "scheduled", "--scheduled/--unscheduled")
    ] = None,
    max_age_s: Annotated[float | None, option(CreatePolicyForm, "max_age_s")] = None,
    drift_after_s: Annotated[float | None, option(CreatePolicyForm, "drift_after_s")] = None,
    reuse_name: ReuseName = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Create a policy from your own data: split it into training rows and frozen items.

    Run it again with newer data or other settings: settings that are not given stay as they are.
    """
    settings = enter(params)
    from tasks.policies import create_policy, describe, worked_examples

    worked = worked_examples(few_shot) if few_shot else None
    form = filled(
        CreatePolicyForm, name=name, owner=owner, base=base, data=data, method=method, verifier=verifier,
        start=start, epochs=epochs, system=system,
        steps=steps, lr=lr, loss=loss, kl=kl, rank=rank, groups=groups, group_size=group_size,
        max_tokens=max_tokens, items=items, scheduled=scheduled, max_age_s=max_age_s,
        drift_after_s=drift_after_s, few_shot=worked,
    )  # fmt: skip
    created = create_policy(
        settings, name, data, verifier, owner, base, form.settings(), items,
        lambda lines: typer.echo(f"  {lines} lines", err=True), reuse_name,
    )  # fmt: skip
    print_json(asdict(created)) if as_json else typer.echo(describe(created))


@policy_app.command("show")
def show(name: str, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show a policy's settings and where each one is set."""
    settings = enter(params)
    from engine.report.overview import task_of

    resolved = fitted_policy(settings, name)
    values = resolved.config.model_dump(mode="json")
    if not as_json:
        values["task"] = task_of(values)
    rows = [{"setting": key, "value": values[key], "from": resolved.sources[key]} for key in values]
    print_result(as_json, rows, fold=("value",))


@policy_app.command("try")
def try_out(
    name: Annotated[str, typer.Argument(help="Policy to try.")],
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Sample 32 answers of the base, score them, and say whether GRPO can learn from the rewards."""
    settings = enter(params)
    from tasks.tryout import try_policy

    trial = try_policy(settings, name, local_key(settings))
    rows = [group.row() for group in trial.groups]
    print_result(as_json, trial.to_json(), rows, fold=("question", "best answer"))
    if not as_json:
        typer.echo(trial.verdict)


@app.command(rich_help_panel=KEEP)
def purge(
    by: By,
    reason: Reason,
    policy: Annotated[str | None, typer.Argument(help="Policy to remove.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Remove this tenant instead: its keys, policies, answers and usage.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm. A purge cannot be undone.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Remove a policy for good: bytes, rows, sessions, scores, answers, and its model in MLflow.

    Its name stays marked as purged, and can be used again only with --reuse-name. With --tenant, remove a
    tenant for good: keys, policies, and what its keys asked, rated and used. The audit log keeps who changed
    what; it holds no prompt and no answer. Hourly sums of usage stay.
    """
    settings = enter(params)
    if (policy is None) == (tenant is None):
        raise ConfigError("Name the policy to remove, or a tenant with --tenant.")
    if not yes:
        what = (
            f"removes every revision, session, score and answer of {policy!r}, and its model in MLflow"
            if policy
            else f"revokes every key of {tenant!r}, purges its policies, and removes its requests and ratings"
        )
        raise ConfigError(f"This {what}. It cannot be undone. Run it again with --yes to confirm.")
    from tasks.erase import erase
    from tasks.purge import purge as purge_policy

    def say(place: str, counts: Mapping[str, int]) -> None:
        removed = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items() if count)
        if not as_json:
            typer.echo(f"  {place:<10} {removed or 'nothing there'}")

    if tenant:
        places = erase(settings, tenant, by, reason, say)
        done = f"{tenant} is erased, by {by}: {reason.rstrip('.')}."
        return print_json({"tenant": tenant, "places": places}) if as_json else typer.echo(done)
    record = purge_policy(settings, str(policy), by, reason, say)
    if as_json:
        return print_json(asdict(record))
    typer.echo(
        f"{policy} is purged, by {record.by}: {record.reason.rstrip('.')}. Engines drop its adapters from "
        "memory within a second."
    )
    if record.elsewhere:
        typer.echo(
            "MLflow artifacts of it in other places were kept; remove them yourself: "
            f"{', '.join(record.elsewhere)}."
        )
    if (kept := settings.suites_dir / str(policy)).is_dir():
        typer.echo(f"Its data was kept: {kept}.")
