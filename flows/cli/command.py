"""The `graftwork` command. Imports lazily: `graftwork --help` needs neither torch nor Prefect.

An entry point: it reads the settings, sets the variables of our processes, and turns an error for
a person into one sentence and its exit code.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from engine.errors import ConfigError, GraftworkError
from engine.services import lifecycle as services
from engine.settings.forms import AdaptForm
from engine.threads import background, in_parallel
from engine.version import code_version
from flows.cli import adapters, admin, decide, look, plan, policy, purge, residency, score, serve, store
from flows.entry import PARAMS, Again, ParamsFile, ReuseName, check, enter, filled, require_services
from tasks.deployments import install
from tasks.outcome import Stages, shortcomings
from tasks.purged_names import reuse_purged_name

AGAIN_S = 0.05
app = typer.Typer(
    help="Train, prove, score, release and roll back LoRA revisions over one resident base.",
    no_args_is_help=True,
    add_completion=False,
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
def run(
    base: Annotated[
        str | None,
        typer.Option(
            help="tiny-dense, tiny-moe, tiny-mla or, on a GPU, tiny-dsa; with a state directory of its own."
        ),
    ] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """The main job: adapt two policies, release them, release a bad one, see it rolled back."""
    settings = enter(params, base)
    check(settings, [*settings.policies, settings.demo.bad_policy])
    from flows import display

    began, stages = time.time(), Stages()
    with contextlib.ExitStack() as stack:
        with stages("services"):
            build = display.base_builder(settings, stages)
            imports: list[Future[None]] = []

            def build_then_import() -> None:
                build()
                # Not beside the build: transformers' lazy imports are not safe in two threads.
                imports.append(background(load_flows))

            stack.enter_context(services.session(settings, build_then_import, display.print_service))
            if imports:
                imports[0].result()
            load_flows()
        from flows.demo import demo
        from tasks.steps import flush

        stack.callback(flush)

        with display.live():
            outcome = demo(settings, stages.seconds, began)
    display.print_outcome(settings, outcome)
    if found := shortcomings(outcome.summary):
        raise GraftworkError(" ".join(found))


@app.command()
def up(
    only: Annotated[list[str] | None, typer.Option(help="This service alone; may be repeated.")] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Start the services and leave them running."""
    settings = enter(params)
    from flows.display import base_builder, print_addresses, print_service

    every = (*services.RESIDENT, services.WORKER)
    started = services.up(settings, base_builder(settings, Stages()), print_service, only or every)
    if not only:
        # Also beside running services: a changed schedule, or what failed the first time.
        print_service("prefect", f"{install(settings)} deployments and their automations")
    typer.echo("The services run." if started else "The services were already running.")
    print_addresses(settings)


@app.command()
def down(params: ParamsFile = PARAMS) -> None:
    """Stop the services; nothing is left running."""
    stopped = services.down(enter(params))
    typer.echo("The services are stopped." if stopped else "No services were running.")


@app.command()
def adapt(
    names: Annotated[list[str] | None, typer.Argument(metavar="[POLICY]...", show_default=False)] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy; may be given several times.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, this time.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, this time.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the adapter, this time.")] = None,
    loss: Annotated[str | None, typer.Option(help="What a step minimises, this time.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of problems and samples, this time.")] = None,
    reuse_name: ReuseName = False,
    again: Again = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Train policies side by side, then export, register, verify and score their revisions."""
    settings = enter(params)
    chosen = list(dict.fromkeys([*(names or ()), *(policy or ())]))
    if not chosen:
        raise ConfigError("Say which policy to adapt: `graftwork adapt --policy NAME`, once for each.")
    forms = {
        name: filled(AdaptForm, policy=name, steps=steps, lr=lr, rank=rank, loss=loss, seed=seed)
        for name in chosen
    }
    check(settings, chosen)
    require_services(settings)
    for name in chosen:
        reuse_purged_name(settings, name, settings.policy(name).owner, reuse_name or again)
    from flows import display
    from flows.adapt import adapt as adapt_flow
    from tasks.steps import preload

    preload()
    rows: dict[str, Mapping[str, Any]] = {}

    def adapt_one(name: str) -> None:
        rows[name] = adapt_flow(forms[name]).row()

    try:
        with display.live():
            # Prefect ends a flow cleanly on SIGTERM only in the main thread.
            if len(chosen) > 1:
                in_parallel(*(partial(adapt_one, name) for name in chosen))
            else:
                adapt_one(*chosen)
    finally:
        # Also beside one that failed: the others' revisions are there.
        for name in filter(rows.get, chosen):
            display.print_row(rows[name])


GROUPS = (
    policy,
    score,
    decide,
    look,
    residency,
    serve,
    plan,
    adapters,
    purge,
    store,
    admin,
)
for group in GROUPS:
    app.add_typer(group.app)


def main() -> None:
    """Run the command; an error for a person is one sentence on stderr, with its exit code."""
    # A shell may have started this in the background with SIGINT ignored; stopping cleanly matters more.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    sys.unraisablehook = interrupt_again
    try:
        app()
    except GraftworkError as error:
        typer.secho(str(error), fg="red", err=True)
        leave(error.exit_code)
    except KeyboardInterrupt:
        leave(130)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1 if end.code else 0)


def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception Python has dropped: in a callback of its garbage collection."""
    numbers = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}
    number = numbers.get(ignored.exc_type)
    if number is None:
        return sys.__unraisablehook__(ignored)
    # A moment later: what is raised in here is dropped as well.
    threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()


def leave(code: int) -> NoReturn:
    """End the process now: everything of ours is closed and flushed.

    The interpreter's own end would wait for other libraries' threads, which ask servers that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def load_flows() -> None:
    """Import the flows and all that their tasks need; it takes seconds, best while the services start."""
    from tasks.steps import preload

    preload()
