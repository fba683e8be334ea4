"""Commands on the installation's safety: the logins of its pages, what is open, the audit log."""

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from engine.errors import ConfigError, NotRunning
from engine.security.credentials import logins, web_logins
from flows.cli.look import LOOK
from flows.entry import PARAMS, Json, ParamsFile, catalog, enter, print_json, print_result

app = typer.Typer()


@app.command(rich_help_panel=LOOK)
def login(
    shell: Annotated[
        bool,
        typer.Option("--shell", help='Print variables for a shell: eval "$(graftwork login --shell)".'),
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Print addresses, users and passwords of the web pages of Prefect, MLflow and the controller.

    Anyone who can log in to Prefect can run code as the worker. Give tenants API keys instead.
    """
    settings = enter(params)
    web_pages = web_logins(settings)
    if shell:
        addresses = {
            "MLFLOW_TRACKING_URI": settings.url("mlflow"),
            "PREFECT_API_URL": f"{settings.url('prefect')}/api",
        }
        for name, value in (addresses | logins(settings.paths)).items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        return
    print_result(as_json, web_pages, fold=("password",))


@app.command(rich_help_panel=LOOK)
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
    if security:
        from tasks.exposure import reached

        reached_calls, down = reached(settings)
        rows = [asdict(one) for one in reached_calls]
        print_result(as_json, {"reached": rows, "not_running": down}, rows)
        if down and not as_json:
            raise NotRunning(f"Not asked, because they do not run: {', '.join(down)}. Run `graftwork up`.")
        return
    from tasks.doctor import examine

    findings = examine(settings)
    print_result(as_json, [asdict(one) for one in findings], fold=("seen", "advice"))
    if any(one.advice for one in findings):
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def audit(
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the hash of every entry, and print the last as ID:HASH.")
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option(help="With --verify: require this entry, ID:HASH of an earlier check kept elsewhere."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Show at most this many entries, newest first.")
    ] = 20,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """List who changed what: routes, releases, tombstones, policies, purges, switches."""
    number, _, digest = (expect or "").partition(":")
    if expect and not (number.isdecimal() and digest):
        raise ConfigError(f"{expect!r} is no entry. Write ID:HASH, as `graftwork audit --verify` prints it.")
    from engine.catalog.audit import Audit
    from engine.report.why import moment

    with catalog(params) as index:
        log = Audit(index.access)
        if verify or expect:
            last, last_hash = log.verify((int(number), digest) if expect else None)
            if as_json:
                return print_json({"entries": last, "last": f"{last}:{last_hash}"})
            return typer.echo(
                f"{last} entries, each with its hash. Keep the last one elsewhere: {last}:{last_hash}"
            )
        entries = [asdict(entry) for entry in log.newest(limit)]
    columns = ("id", "at", "actor", "on_behalf_of", "action", "subject", "before", "after")
    rows = [{name: one[name] for name in columns} | {"at": moment(one["at"])} for one in entries]
    print_result(as_json, entries, rows, fold=("subject", "before", "after"))
