"""The `graftwork` command: its services and training commands, its groups, its signals and exit codes.

Imports lazily: `graftwork --help` needs neither torch nor Prefect.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from engine.base.names import TOYS
from engine.errors import ConfigError, GraftworkError
from engine.services import lifecycle as services
from engine.settings.forms import AdaptForm
from engine.threads import background, in_parallel
from engine.version import code_version
from flows.cli import (
    adapters,
    admin,
    backup,
    chat,
    decisions,
    look,
    plan,
    policies,
    score,
    security,
    serve,
    simulate,
    store,
    tenants,
)
from flows.entry import (
    PARAMS,
    Json,
    ParamsFile,
    ReuseName,
    check,
    enter,
    filled,
    option,
    prefer_equal_bits,
    print_done,
    print_json,
)
from tasks.deployments import install
from tasks.outcome import Adapted, Stages, shortcomings
from tasks.purge_record import reuse_purged_name
from tasks.starter import write_starter

AGAIN_S = 0.05
app = typer.Typer(
    help="Train, score, serve, release and roll back LoRA adapter revisions on one resident base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def print_version(given: bool) -> None:
    """Print the version and the commit, and exit."""
    if given:
        typer.echo(f"graftwork {code_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options of the command itself."""


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to begin in; it is made.")],
    as_json: Json = False,
) -> None:
    """Begin outside a checkout: write settings, an example's data and a README into a directory."""
    files = [str(file) for file in write_starter(directory)]
    if not as_json:
        typer.echo("\n".join(f"  {file}" for file in files))
    go_on = f"Go on with `cd {shlex.quote(str(directory))}` and `graftwork up`, or as README.md says there."
    print_done(as_json, go_on, files=files)


@app.command()
def run(
    base: Annotated[
        str | None,
        typer.Option(
            help="Run on tiny-dense, tiny-moe, tiny-mla, (GPU) tiny-dsa or (`make real` first) smollm2-135m, "
            "in a state directory of its own. Default: base.name."
        ),
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Run the main job: adapt and release the policies, then roll back a bad revision."""
    settings = enter(params, base, starting=True)
    if not settings.policies:
        raise ConfigError(f"{settings.source} has no `policies`, so the main job has none to adapt.")
    check(settings, list(settings.policies))
    from flows import display

    began, stages = time.time(), Stages()
    with contextlib.ExitStack() as stack:
        stack.enter_context(display.progress_apart(as_json))
        with stages("services"):
            build = display.base_builder(settings, stages)
            imports: list[Future[None]] = []

            def build_then_import() -> None:
                build()
                # Not beside the build: transformers' lazy imports are not safe in two threads.
                imports.append(background(lambda: import_module("tasks.steps").preload()))

            stack.enter_context(services.session(settings, build_then_import, display.print_service))
            for imported in imports:
                imported.result()
        from flows.demo import demo
        from tasks.steps import flush, preload

        preload()
        stack.callback(flush)

        with display.live():
            outcome = demo(settings, stages.seconds, began)
    print_json(outcome.summary) if as_json else display.print_outcome(settings, outcome)
    if faults := shortcomings(outcome.summary, apart=settings.base.name in TOYS):
        raise GraftworkError(" ".join(faults))


@app.command()
def up(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Start only this one of engine, trainer, controller, mlflow, prefect, tinker, worker; "
            "repeatable."
        ),
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Start the services in the background, install the Prefect deployments, end a dead worker's runs."""
    settings = enter(params, starting=True)
    from flows.display import base_builder, print_addresses, print_service, progress_apart
    from tasks.stuck_runs import free_stuck, worker_started

    every = (*services.RESIDENT, services.WORKER)
    with progress_apart(as_json):
        started = services.up(settings, base_builder(settings, Stages()), print_service, only or every)
        if not only:
            # Also beside running services: a changed schedule, or what failed the first time.
            print_service("prefect", f"{install(settings)} deployments and their automations")
            now = time.time()
            for dead in free_stuck(settings, now, worker_started(settings, now)):
                print_service("prefect", f"ended: {dead}")
    done = "The services are running." if started else "The services were already running."
    print_done(as_json, done, services=[asdict(state) for state in services.status(settings)])
    if not as_json:
        print_addresses(settings)


@app.command()
def down(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Stop the services that `graftwork up` started."""
    stopped = services.down(enter(params))
    print_done(as_json, "The services are stopped." if stopped else "No services were running.")


@app.command()
def adapt(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="POLICY...", show_default=False, help="Policies to adapt.")
    ] = None,
    steps: Annotated[int | None, option(AdaptForm, "steps")] = None,
    lr: Annotated[float | None, option(AdaptForm, "lr")] = None,
    rank: Annotated[int | None, option(AdaptForm, "rank")] = None,
    loss: Annotated[str | None, option(AdaptForm, "loss")] = None,
    seed: Annotated[int | None, option(AdaptForm, "seed")] = None,
    reuse_name: ReuseName = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Train policies concurrently, then export, register, verify and score a revision of each."""
    settings = enter(params)
    chosen = list(dict.fromkeys(names or ()))
    if not chosen:
        raise ConfigError("Say which policy to adapt: `graftwork adapt POLICY...`.")
    forms = {
        name: filled(AdaptForm, policy=name, steps=steps, lr=lr, rank=rank, loss=loss, seed=seed)
        for name in chosen
    }
    check(settings, chosen)
    services.require_running(settings)
    for name in chosen:
        reuse_purged_name(settings, name, settings.policy(name).owner, reuse_name)
    from flows import display
    from flows.adapt import adapt as adapt_flow
    from tasks.steps import preload

    preload()
    adapted: dict[str, Adapted] = {}

    def adapt_one(name: str) -> None:
        adapted[name] = adapt_flow(forms[name])

    try:
        with display.progress_apart(as_json), display.live():
            # Prefect ends a flow cleanly on SIGTERM only in the main thread.
            if len(chosen) > 1:
                in_parallel(*(partial(adapt_one, name) for name in chosen))
            else:
                adapt_one(*chosen)
    finally:
        # Print the finished policies even when another one failed.
        finished = [adapted[name] for name in chosen if name in adapted]
        if as_json:
            print_json([one.to_json() for one in finished])
        else:
            for one in finished:
                display.print_row(one.row())


GROUPS = (
    score,
    decisions,
    simulate,
    look,
    chat,
    policies,
    adapters,
    security,
    serve,
    plan,
    store,
    backup,
    tenants,
    admin,
)
for group in GROUPS:
    app.add_typer(group.app)


def main(command: typer.Typer = app) -> None:
    """Run a command; report a `GraftworkError` on stderr and exit with its code."""
    # A shell ignores SIGINT for background jobs; handle it all the same, to stop services cleanly.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    sys.unraisablehook = interrupt_again
    # MKL reads it at its first product: before any command imports torch.
    prefer_equal_bits()
    try:
        command()
    except GraftworkError as error:
        typer.secho(str(error), fg="red", err=True)
        leave(error.exit_code)
    except KeyboardInterrupt:
        leave(130)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1 if end.code else 0)


def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception Python dropped.

    Python drops exceptions of signal handlers that run inside a destructor or a garbage collection callback.
    """
    numbers = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}
    number = numbers.get(ignored.exc_type)
    if number is None:
        return sys.__unraisablehook__(ignored)
    # An exception raised in this hook is dropped as well, so the signal comes later.
    threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads of other libraries.

    Everything of ours is closed and flushed. The interpreter's own exit would join threads of libraries that
    still call services which have stopped.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
