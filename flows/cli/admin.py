"""Commands for whoever runs an installation: keys, ledger, benchmarks."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError
from engine.process_reaper import die_with_parent
from flows.entry import PARAMS, ParamsFile, catalog, enter, variables_with

app = typer.Typer()
key_app = typer.Typer(help="Keys for the engine and the controller.", no_args_is_help=True)
ledger_app = typer.Typer(help="The record of every number.", no_args_is_help=True)
app.add_typer(key_app, name="key")
app.add_typer(ledger_app, name="ledger")


@key_app.command("create")
def key_create(
    owner: str,
    scope: Annotated[str, typer.Option(help="admin, user or score")] = "user",
    params: ParamsFile = PARAMS,
) -> None:
    """Create a key and print it, the only time that it can be read."""
    if scope not in ("admin", "user", "score"):
        raise ConfigError(f"There is no scope {scope!r}. Use admin, user or score.")
    typer.echo(catalog(params).keys.create(owner, scope))


@key_app.command("ls")
def key_ls(params: ParamsFile = PARAMS) -> None:
    """List keys by the start of their hash."""
    from flows.display import print_keys

    print_keys(catalog(params).keys.all())


@key_app.command("revoke")
def key_revoke(prefix: str, params: ParamsFile = PARAMS) -> None:
    """Revoke a key by the start of its hash, as `graftwork key ls` shows it."""
    revoked = catalog(params).keys.revoke(prefix)
    typer.echo(f"The {revoked.scope} key of {revoked.owner} is revoked.")


@ledger_app.command("ingest")
def ledger_ingest(params: ParamsFile = PARAMS) -> None:
    """Insert spooled events now; for when no controller runs, which does the same each second."""
    settings = enter(params)
    from engine.ledger.ledger import Ledger

    ledger = Ledger(settings.paths.ledger)
    with catalog(params) as index:
        count = ledger.ingest(settings.paths.spool, index.purges.gone)
    ledger.snapshot(settings.paths.ledger_snapshot)
    typer.echo(f"{count} events are in the ledger.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context, name: str, params: ParamsFile = PARAMS) -> None:
    """Run one benchmark of a source checkout, tests/bench/NAME.py; its own options follow the name."""
    settings = enter(params)
    folder = Path(__file__).parents[2] / "tests" / "bench"
    script = folder / f"{name}.py"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("[a-z]*.py")))
        raise ConfigError(f"There is no benchmark {name!r}. Known ones: {known or 'none; use a checkout'}.")
    command = [sys.executable, str(script), "--params", str(params), "--out", str(settings.paths.bench)]
    variables = variables_with(folder.parent / "helpers")
    dies_too = partial(die_with_parent, os.getpid())
    run = subprocess.run([*command, *context.args], check=False, env=variables, preexec_fn=dies_too)
    raise typer.Exit(run.returncode)
