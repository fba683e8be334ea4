"""The command that removes a policy for good."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from engine.errors import ConfigError
from flows.entry import PARAMS, Json, ParamsFile, enter

app = typer.Typer()


@app.command()
def purge(
    policy: str,
    by: Annotated[str, typer.Option(help="Your name; it is kept with the purged name.")],
    reason: Annotated[str, typer.Option(help="Why; it is kept too.")],
    yes: Annotated[bool, typer.Option("--yes", help="Really: nothing of it comes back.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Remove a policy for good: bytes, rows, sessions, scores and answers, MLflow; its name stays marked."""
    settings = enter(params)
    if not yes:
        raise ConfigError(
            f"This removes every revision, session, score and answer of {policy!r}, and its model in MLflow, "
            "for good. If that is what you want, run it again with --yes."
        )
    from tasks.purge import Counts
    from tasks.purge import purge as purge_policy

    def say(place: str, counts: Counts) -> None:
        if not as_json:
            found = ", ".join(
                f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items() if count
            )
            typer.echo(f"  {place:<10} {found or 'nothing there'}")

    record = purge_policy(settings, policy, by, reason, say)
    if as_json:
        return typer.echo(json.dumps(asdict(record), indent=2))
    typer.echo(
        f"{policy} is purged, by {record.by}: {record.reason.rstrip('.')}. What engines hold of it leaves "
        "their memory within a second."
    )
    if record.elsewhere:
        typer.echo(
            "MLflow had artifacts of it in other places, which stay until you remove them: "
            f"{', '.join(record.elsewhere)}."
        )
    if (settings.suites_dir / policy).is_dir():
        typer.echo(f"Its data is yours and stays: {settings.suites_dir / policy}.")
