"""Commands about policies: create one from your own data, list them, show their settings."""

import json
from pathlib import Path
from typing import Annotated

import typer

from engine.base.fitting import fitted_policy
from engine.settings.forms import CreatePolicyForm
from engine.settings.params import known_policies
from flows.entry import PARAMS, Json, ParamsFile, ReuseName, asked, enter, filled
from tasks.outcome import local_key

app = typer.Typer()
policy_app = typer.Typer(help="Policies: lines of training, each with its task.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")


@policy_app.command("create")
def create(
    name: str,
    data: Annotated[
        Path, typer.Option(help="Questions and answers: JSON lines, JSON, CSV, Parquet or a saved dataset.")
    ],
    verifier: Annotated[str, asked(CreatePolicyForm, "verifier")],
    owner: Annotated[str, asked(CreatePolicyForm, "owner")] = "local",
    base: Annotated[str | None, asked(CreatePolicyForm, "base")] = None,
    system: Annotated[str | None, asked(CreatePolicyForm, "system")] = None,
    few_shot: Annotated[
        Path | None, typer.Option(help="Worked questions before each one, in such a file.")
    ] = None,
    steps: Annotated[int | None, asked(CreatePolicyForm, "steps")] = None,
    lr: Annotated[float | None, asked(CreatePolicyForm, "lr")] = None,
    loss: Annotated[str | None, asked(CreatePolicyForm, "loss")] = None,
    kl: Annotated[float | None, asked(CreatePolicyForm, "kl")] = None,
    rank: Annotated[int | None, asked(CreatePolicyForm, "rank")] = None,
    groups: Annotated[int | None, asked(CreatePolicyForm, "groups")] = None,
    group_size: Annotated[int | None, asked(CreatePolicyForm, "group_size")] = None,
    max_tokens: Annotated[int | None, asked(CreatePolicyForm, "max_tokens")] = None,
    items: Annotated[int, asked(CreatePolicyForm, "items")] = 200,
    scheduled: Annotated[
        bool | None, asked(CreatePolicyForm, "scheduled", "--scheduled/--unscheduled")
    ] = None,
    max_age_s: Annotated[float | None, asked(CreatePolicyForm, "max_age_s")] = None,
    drift_after_s: Annotated[float | None, asked(CreatePolicyForm, "drift_after_s")] = None,
    reuse_name: ReuseName = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Create a policy from your own data: split it into training rows and frozen items.

    Run it again with newer data or other settings: settings that are not given stay as they are.
    """
    settings = enter(params)
    from tasks.policies import create_policy, describe, worked_examples

    worked = worked_examples(few_shot) if few_shot else None
    form = filled(
        CreatePolicyForm, name=name, owner=owner, base=base, data=data, verifier=verifier, system=system,
        steps=steps, lr=lr, loss=loss, kl=kl, rank=rank, groups=groups, group_size=group_size,
        max_tokens=max_tokens, items=items, scheduled=scheduled, max_age_s=max_age_s,
        drift_after_s=drift_after_s, few_shot=worked,
    )  # fmt: skip
    created = create_policy(
        settings, name, data, verifier, owner, base, form.settings(), items,
        lambda lines: typer.echo(f"  {lines} lines", err=True), reuse_name,
    )  # fmt: skip
    typer.echo(describe(created))


@policy_app.command("ls")
def ls(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """List the policies that can be trained here."""
    settings = enter(params)
    rows = []
    for name in known_policies(settings):
        config = settings.policy(name)
        row = {"policy": name, "owner": config.owner, "verifier": config.verifier, "suite": config.suite}
        rows.append(row | {"scheduled": config.scheduled})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from flows.display import print_rows

    print_rows(rows, fold=("policy", "owner", "verifier"))


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
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from flows.display import print_rows

    print_rows(rows, fold=("value",))


@policy_app.command("try")
def try_out(
    name: Annotated[str, typer.Argument(help="Policy to try.")],
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Sample 32 answers of the base, score them, and say whether GRPO can learn from the rewards."""
    settings = enter(params)
    from flows.display import print_rows
    from tasks.tryout import try_policy

    trial = try_policy(settings, name, local_key(settings))
    if as_json:
        typer.echo(json.dumps(trial.to_json(), indent=2))
        return
    print_rows([group.row() for group in trial.groups], fold=("question", "best answer"))
    typer.echo(trial.verdict)
