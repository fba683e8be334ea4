"""Commands on the installation's safety: the logins of its pages, what is open, the audit log."""

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from engine.errors import ConfigError, NotRunning
from engine.security.credentials import logins
from flows.cli.look import print_json
from flows.entry import PARAMS, Json, ParamsFile, catalog, enter
from tasks.logins import web_logins

app = typer.Typer()
audit_app = typer.Typer(help="Show and check the audit log of every change.", no_args_is_help=True)
app.add_typer(audit_app, name="audit")
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many entries, newest first.")]


@app.command()
def login(
    shell: Annotated[
        bool,
        typer.Option("--shell", help='Print variables for a shell: eval "$(graftwork login --shell)".'),
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Print addresses, users and passwords of the web pages of Prefect, MLflow and the controller.

    Who logs in to Prefect may run code as the worker. Give tenants API keys instead.
    """
    settings = enter(params)
    found = web_logins(settings)
    if shell:
        addresses = {
            "MLFLOW_TRACKING_URI": settings.url("mlflow"),
            "PREFECT_API_URL": f"{settings.url('prefect')}/api",
        }
        for name, value in (addresses | logins(settings.paths)).items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        return
    if as_json:
        return print_json([asdict(one) for one in found])
    from flows.display import print_rows

    print_rows([asdict(one) for one in found], fold=("password",))


@app.command()
def doctor(
    security: Annotated[
        bool, typer.Option("--security", help="List what a caller without a key reaches, by asking.")
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Check the installation: versions, disk, rights, ports, credentials, clocks, dead runs; say what to do.

    Exits with 1 when something is wrong.
    """
    settings = enter(params)
    from flows.display import print_rows

    if security:
        from tasks.exposure import reached

        found, down = reached(settings)
        if as_json:
            return print_json({"reached": [asdict(one) for one in found], "not_running": down})
        print_rows([asdict(one) for one in found])
        if down:
            raise NotRunning(f"Not asked, because they do not run: {', '.join(down)}. Run `graftwork up`.")
        return
    from tasks.doctor import examine

    findings = examine(settings)
    if as_json:
        print_json([asdict(one) for one in findings])
    else:
        print_rows([asdict(one) for one in findings], fold=("seen", "advice"))
    if any(one.advice for one in findings):
        raise typer.Exit(1)


@audit_app.command("ls")
def audit_ls(limit: Limit = 20, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """List who changed what: routes, releases, tombstones, policies, purges, switches."""
    from engine.catalog.audit import Audit

    with catalog(params) as index:
        entries = Audit(index.access).newest(limit)
    if as_json:
        return print_json([asdict(entry) for entry in entries])
    from engine.report.why import moment
    from flows.display import print_rows

    print_rows(
        [
            {"id": one.id, "at": moment(one.at), "actor": one.actor, "on_behalf_of": one.on_behalf_of or ""}
            | {"action": one.action, "subject": one.subject, "before": one.before, "after": one.after}
            for one in entries
        ],
        fold=("subject", "before", "after"),
    )


@audit_app.command("verify")
def audit_verify(
    expect: Annotated[
        str | None,
        typer.Option(help="Require this entry, as ID:HASH of an earlier check kept outside the catalog."),
    ] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Check the hash of every entry, and print the last one as ID:HASH."""
    number, _, digest = (expect or "").partition(":")
    if expect and not (number.isdecimal() and digest):
        raise ConfigError(f"{expect!r} is no entry. Write ID:HASH, as `graftwork audit verify` prints it.")
    from engine.catalog.audit import Audit

    with catalog(params) as index:
        last, found = Audit(index.access).verify((int(number), digest) if expect else None)
    typer.echo(f"{last} entries, each with its hash. Keep the last one elsewhere: {last}:{found}")
