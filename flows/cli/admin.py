"""Commands for administrators: the ledger, benchmarks."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.errors import ConfigError
from engine.process_reaper import die_with_parent
from flows.cli.plan import MEASURE
from flows.cli.store import KEEP
from flows.entry import PARAMS, Json, ParamsFile, enter, print_json, variables_with

app = typer.Typer()


@app.command(rich_help_panel=KEEP)
def ledger(
    work: Annotated[
        Literal["show", "ingest", "archive"],
        typer.Argument(metavar="[show|ingest|archive]", help="What to do first."),
    ] = "show",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Show the ledger's archive in Parquet: when it was last complete, its rows and days, its last error.

    ingest: insert spooled events into the ledger, which a running controller does every second. archive:
    bring the archive up to date, without waiting for the controller.
    """
    settings = enter(params)
    from tasks.ledger_archive import archive_now, archived, ingest, sentences

    if work == "ingest":
        count = ingest(settings)
        return print_json({"inserted": count}) if as_json else typer.echo(f"Inserted {count} events.")
    if work == "archive":
        archive_now(settings)
    archive = archived(settings)
    if as_json:
        return print_json(archive)
    for sentence in sentences(archive):
        typer.echo(sentence)


# Without a help option of its own, so that `--help` after the name reaches the benchmark.
@app.command(
    rich_help_panel=MEASURE,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
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
    known = ", ".join(sorted(path.stem for path in folder.glob("[a-z]*.py")))
    if not known:
        raise ConfigError(
            "Benchmarks are in a source checkout alone, in tests/bench. Run this command there."
        )
    if not script.is_file():
        raise ConfigError(f"There is no benchmark {name!r}. Known benchmarks: {known}.")
    command = [sys.executable, str(script), "--params", str(params), "--out", str(settings.paths.bench)]
    alone = nullcontext() if "--help" in context.args else _alone(folder.parents[1])
    with alone:
        code = run_patiently([*command, *context.args], variables_with(folder.parents[1]))
    raise typer.Exit(code)


def _alone(checkout: Path) -> AbstractContextManager[None]:
    """Return the lock that tests and benchmarks take; only a checkout has it."""
    sys.path.append(str(checkout))
    from tests.helpers.machine_lock import machine_lock

    return machine_lock()


def run_patiently(command: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
    """Run a program that ends by itself on Ctrl-C, and dies with this process; return its exit code.

    A terminal sends Ctrl-C to both, and the program needs time to end what it started.
    """
    dies_too = partial(die_with_parent, os.getpid())
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, check=False, env=variables, preexec_fn=dies_too).returncode
    finally:
        signal.signal(signal.SIGINT, before)
