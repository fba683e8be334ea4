"""Commands for administrators: API keys, the ledger, benchmarks."""

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
key_app = typer.Typer(help="Create, list and revoke API keys of engine and controller.", no_args_is_help=True)
ledger_app = typer.Typer(help="Maintain the ledger, the database of recorded numbers.", no_args_is_help=True)
app.add_typer(key_app, name="key")
app.add_typer(ledger_app, name="ledger")


@key_app.command("create")
def key_create(
    owner: Annotated[str, typer.Argument(help="Owner of the key.")],
    scope: Annotated[
        str,
        typer.Option(help="Allow requests (user), also scoring and rollouts (score), or everything (admin)."),
    ] = "user",
    params: ParamsFile = PARAMS,
) -> None:
    """Create a key and print it. Only its hash is stored, so it cannot be printed again."""
    if scope not in ("admin", "user", "score"):
        raise ConfigError(f"There is no scope {scope!r}. Use admin, user or score.")
    typer.echo(catalog(params).keys.create(owner, scope))


@key_app.command("ls")
def key_ls(params: ParamsFile = PARAMS) -> None:
    """List keys with owner, scope, state and the first digits of their hash."""
    from flows.display import print_keys

    print_keys(catalog(params).keys.all())


@key_app.command("revoke")
def key_revoke(
    prefix: Annotated[str, typer.Argument(help="First digits of the key's hash, as `key ls` shows them.")],
    params: ParamsFile = PARAMS,
) -> None:
    """Revoke a key, so that requests with it are refused."""
    revoked = catalog(params).keys.revoke(prefix)
    typer.echo(f"The {revoked.scope} key of {revoked.owner} is revoked.")


@ledger_app.command("ingest")
def ledger_ingest(params: ParamsFile = PARAMS) -> None:
    """Insert spooled events into the ledger.

    A running controller does this every second; use the command when none runs.
    """
    settings = enter(params)
    from engine.ledger.ledger import Ledger

    ledger = Ledger(settings.paths.ledger)
    with catalog(params) as index:
        count = ledger.ingest(settings.paths.spool, index.purges.gone)
    ledger.snapshot(settings.paths.ledger_snapshot)
    typer.echo(f"Inserted {count} events into the ledger.")


# Without a help option of its own, so that `--help` after the name reaches the benchmark.
@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Benchmark to run, such as handoff or storm.")],
    params: ParamsFile = PARAMS,
) -> None:
    """Run a benchmark of a source checkout, tests/bench/NAME.py.

    Options after the name go to the benchmark; `graftwork bench NAME --help` lists them.
    """
    if name == "--help":
        return typer.echo(context.get_help())
    settings = enter(params)
    folder = Path(__file__).parents[2] / "tests" / "bench"
    script = folder / f"{name}.py"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("[a-z]*.py")))
        raise ConfigError(
            f"There is no benchmark {name!r}. Known benchmarks: {known or 'none; run from a checkout'}."
        )
    command = [sys.executable, str(script), "--params", str(params), "--out", str(settings.paths.bench)]
    variables = variables_with(folder.parent / "helpers")
    dies_too = partial(die_with_parent, os.getpid())
    run = subprocess.run([*command, *context.args], check=False, env=variables, preexec_fn=dies_too)
    raise typer.Exit(run.returncode)
