"""The `graftwork` command. Imports lazily: `graftwork --help` needs neither torch nor Prefect.

An entry point: it reads the settings, sets the variables of our processes, and turns an error for
a person into one sentence and its exit code.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from engine.config import Params, load_params, split_served_name
from engine.errors import ConfigError, GraftworkError

app = typer.Typer(
    help="Train, prove, score, release and roll back LoRA revisions over one resident base.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
key_app = typer.Typer(help="Keys for the engine and the controller.", no_args_is_help=True)
ledger_app = typer.Typer(help="The record of every number.", no_args_is_help=True)
app.add_typer(key_app, name="key")
app.add_typer(ledger_app, name="ledger")

ParamsFile = Annotated[Path, typer.Option("--params", help="The file of settings.", show_default=True)]
Revision = Annotated[str, typer.Argument(help="POLICY@DIGEST; the digest may be shortened.")]
By = Annotated[str, typer.Option(help="Who decides this; it is recorded.")]
Reason = Annotated[str, typer.Option(help="Why; it is recorded.")]
PARAMS = Path("params.yaml")


@app.command()
def run(params: ParamsFile = PARAMS) -> None:
    """The main job: adapt two policies, release them, release a bad one, see it rolled back."""
    settings = enter(params)
    check(settings, [*settings.policies, settings.demo.bad_policy])
    from engine import services
    from flows import display
    from tasks.outcome import Stages, shortcomings
    from tasks.parallel import background

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
def up(params: ParamsFile = PARAMS) -> None:
    """Start the services and leave them running."""
    settings = enter(params)
    from engine import services
    from flows.display import base_builder, print_addresses, print_service
    from tasks.outcome import Stages

    started = services.up(settings, base_builder(settings, Stages()), print_service)
    typer.echo("The services run." if started else "The services were already running.")
    print_addresses(settings)


@app.command()
def down(params: ParamsFile = PARAMS) -> None:
    """Stop the services; nothing is left running."""
    from engine import services

    stopped = services.down(enter(params))
    typer.echo("The services are stopped." if stopped else "No services were running.")


@app.command()
def status(params: ParamsFile = PARAMS) -> None:
    """Show each service: its state, address and age."""
    settings = enter(params)
    from engine import services
    from flows.display import print_status

    print_status(services.status(settings))


@app.command()
def adapt(policy: str, params: ParamsFile = PARAMS) -> None:
    """Train a policy, then export, register, verify and score its revision."""
    settings = enter(params)
    check(settings, [policy])
    require_services(settings)
    from flows import display
    from flows.adapt import adapt as adapt_flow

    with display.live():
        adapted = adapt_flow(settings, policy)
    display.print_row(adapted.row())


@app.command()
def score(revision: Revision, params: ParamsFile = PARAMS) -> None:
    """Score a revision, or with a bare POLICY the base, on the policy's suite."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from tasks.outcome import local_key, score_row
    from tasks.score import score as score_items

    full = catalog(params).revision(policy, digest).digest if digest else None
    print_row(
        score_row(score_items(settings, policy, full, settings.policy(policy).suite, local_key(settings)))
    )


@app.command()
def release(
    revision: Revision,
    by: By = "cli",
    skip_score: Annotated[str | None, typer.Option(help="Skip the offline score, for this reason.")] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Release a revision: probe, score, canary, then promotion or rollback; wait for the verdict."""
    settings = enter(params)
    policy, digest = pinned(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from flows.release import release as release_flow
    from tasks.outcome import release_row

    skip_gates = {"score": skip_score} if skip_score else {}
    print_row(release_row(release_flow(settings, policy, digest, by, skip_gates)))


@app.command()
def promote(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Make a revision the champion now, without a canary; never against a tombstone."""
    decide("promote", revision, by, reason, params)


@app.command()
def rollback(revision: Revision, reason: Reason, by: By = "cli", params: ParamsFile = PARAMS) -> None:
    """Bury a revision: no new request reaches it until somebody lifts it."""
    decide("rollback", revision, by, reason, params)


@app.command()
def lift(revision: Revision, by: By, reason: Reason, params: ParamsFile = PARAMS) -> None:
    """Lift a revision's tombstone, with a name and a reason."""
    decide("lift", revision, by, reason, params)


@app.command()
def report(params: ParamsFile = PARAMS) -> None:
    """Write the HTML report of everything in the ledger."""
    settings = enter(params)
    from tasks.publish import write_report

    now = time.time()
    path = write_report(settings, settings.paths.runs / "report.html", 0.0, now, {})
    typer.echo(f"The report is {path}.")


@app.command()
def bench(name: str, params: ParamsFile = PARAMS) -> None:
    """Run one benchmark of a source checkout: tests/bench/NAME.py."""
    settings = enter(params)
    folder = Path(__file__).parent.parent / "tests" / "bench"
    script = folder / f"{name}.py"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("[a-z]*.py")))
        raise ConfigError(f"There is no benchmark {name!r}. Known ones: {known or 'none; use a checkout'}.")
    command = [sys.executable, str(script), "--params", str(params), "--out", str(settings.paths.bench)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@key_app.command("create")
def key_create(
    owner: str,
    scope: Annotated[str, typer.Option(help="admin, user or score")] = "user",
    params: ParamsFile = PARAMS,
) -> None:
    """Create a key and print it, the only time that it can be read."""
    if scope not in ("admin", "user", "score"):
        raise ConfigError(f"There is no scope {scope!r}. Use admin, user or score.")
    typer.echo(catalog(params).create_key(owner, scope))


@key_app.command("ls")
def key_ls(params: ParamsFile = PARAMS) -> None:
    """List keys by the start of their hash."""
    from flows.display import print_keys

    print_keys(catalog(params).keys())


@key_app.command("revoke")
def key_revoke(prefix: str, params: ParamsFile = PARAMS) -> None:
    """Revoke a key by the start of its hash, as `graftwork key ls` shows it."""
    revoked = catalog(params).revoke_key(prefix)
    typer.echo(f"The {revoked.scope} key of {revoked.owner} is revoked.")


@ledger_app.command("ingest")
def ledger_ingest(params: ParamsFile = PARAMS) -> None:
    """Insert spooled events now; for when no controller runs, which does the same each second."""
    settings = enter(params)
    from engine.quality.ledger import Ledger

    ledger = Ledger(settings.paths.ledger)
    count = ledger.ingest(settings.paths.spool)
    ledger.snapshot(settings.paths.ledger_snapshot)
    typer.echo(f"{count} events are in the ledger.")


def enter(params: Path) -> Params:
    """Read the settings and set this process's variables, before anything heavy is imported."""
    settings = load_params(params)
    from engine.services import environment

    os.environ.update(environment(settings))
    return settings


def load_flows() -> None:
    """Import the flows and all that their tasks need; it takes seconds, best while the services start."""
    from tasks.steps import preload

    import_module("flows.demo")
    preload()


def check(settings: Params, policies: list[str]) -> None:
    """Raise for an unknown policy, task or suite before anything starts."""
    from engine.training.problems import check_task
    from tasks.suites import load_suite

    for name in policies:
        policy = settings.policy(name)
        check_task(policy.task)
        load_suite(policy.suite)


def require_services(settings: Params) -> None:
    from engine import services

    services.require_running(settings)


def catalog(params: Path) -> Any:
    settings = enter(params)
    from engine.adapters.catalog import Catalog, migrate

    settings.state_dir.mkdir(parents=True, exist_ok=True)
    migrate(settings.paths.catalog_url)
    return Catalog(settings.paths.catalog_url)


def pinned(revision: str) -> tuple[str, str]:
    """Split POLICY@DIGEST; `ConfigError` when the digest is missing."""
    policy, digest = split_served_name(revision)
    if not digest:
        raise ConfigError(f"{revision!r} names no revision; write it as POLICY@DIGEST.")
    return policy, digest


def decide(action: str, revision: str, by: str, reason: str, params: Path) -> None:
    """Ask the controller to promote, roll back or lift, in a person's name."""
    settings = enter(params)
    policy, digest = pinned(revision)
    require_services(settings)
    from tasks import release as controller
    from tasks.outcome import local_key

    ask = {"promote": controller.promote, "rollback": controller.rollback, "lift": controller.lift}[action]
    ask(settings.url("controller"), local_key(settings), policy, digest, reason, by)
    typer.echo(f"{action} of {revision}: done.")


def main() -> None:
    """Run the command; an error for a person is one sentence on stderr, with its exit code."""
    # A shell may have started this in the background with SIGINT ignored; stopping cleanly matters more.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    try:
        app()
    except GraftworkError as error:
        typer.secho(str(error), fg="red", err=True)
        leave(error.exit_code)
    except KeyboardInterrupt:
        leave(130)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1 if end.code else 0)


def leave(code: int) -> NoReturn:
    """End the process now: everything of ours is closed and flushed.

    The interpreter's own end would wait for other libraries' threads, which ask servers that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
