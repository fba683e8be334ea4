"""`graftwork purge` and `graftwork erase`: remove a policy, or a tenant, and all that belongs to it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from engine.errors import ConfigError
from flows.entry import PARAMS, Json, ParamsFile, enter

app = typer.Typer()


@app.command()
def purge(
    policy: Annotated[str, typer.Argument(help="Policy to remove.")],
    by: Annotated[str, typer.Option(help="Record your name with the purged policy name.")],
    reason: Annotated[str, typer.Option(help="Record this reason with the purged policy name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Confirm. A purge cannot be undone.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Remove a policy for good: bytes, rows, sessions, scores, answers, and its model in MLflow.

    Its name stays marked as purged, and can be used again only with --reuse-name.
    """
    settings = enter(params)
    if not yes:
        raise ConfigError(
            f"This removes every revision, session, score and answer of {policy!r}, and its model in MLflow. "
            "It cannot be undone. Run it again with --yes to confirm."
        )
    from tasks.purge import purge as purge_policy

    record = purge_policy(settings, policy, by, reason, quiet if as_json else say)
    if as_json:
        return typer.echo(json.dumps(asdict(record), indent=2))
    typer.echo(
        f"{policy} is purged, by {record.by}: {record.reason.rstrip('.')}. Engines drop its adapters from "
        "memory within a second."
    )
    if record.elsewhere:
        typer.echo(
            "MLflow artifacts of it in other places were kept; remove them yourself: "
            f"{', '.join(record.elsewhere)}."
        )
    if (settings.suites_dir / policy).is_dir():
        typer.echo(f"Its data was kept: {settings.suites_dir / policy}.")


@app.command()
def erase(
    tenant: Annotated[str, typer.Option(help="Owner of the keys and policies to remove.")],
    by: Annotated[str, typer.Option(help="Record your name with the removal.")],
    reason: Annotated[str, typer.Option(help="Record this reason with the removal.")],
    yes: Annotated[bool, typer.Option("--yes", help="Confirm. It cannot be undone.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Remove a tenant for good: keys, policies as `purge` does, and what its keys asked, rated and used.

    The audit log keeps who changed what; it holds no prompt and no answer. Hourly sums of usage stay.
    """
    settings = enter(params)
    if not yes:
        raise ConfigError(
            f"This revokes every key of {tenant!r}, purges its policies, and removes its requests and "
            "ratings. It cannot be undone. Run it again with --yes to confirm."
        )
    from tasks.erase import erase as erase_tenant

    places = erase_tenant(settings, tenant, by, reason, quiet if as_json else say)
    if as_json:
        return typer.echo(json.dumps({"tenant": tenant, "places": places}, indent=2))
    typer.echo(f"{tenant} is erased, by {by}: {reason.rstrip('.')}.")


def say(place: str, counts: Mapping[str, int]) -> None:
    """Print what was removed from a place, or kept."""
    found = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items() if count)
    typer.echo(f"  {place:<10} {found or 'nothing there'}")


def quiet(place: str, counts: Mapping[str, int]) -> None:
    """Print nothing."""
