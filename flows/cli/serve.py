"""Serving beyond `graftwork up`: one service or revision in the foreground, a balancer's configuration."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from engine.catalog.records import served_name
from engine.errors import ConfigError
from engine.services import lifecycle as services
from flows.entry import PARAMS, Json, ParamsFile, enter, print_done
from tasks.deployments import install
from tasks.outcome import Stages

app = typer.Typer()
SERVE = "Serve elsewhere"
Served = Annotated[
    str,
    typer.Option(
        "--revision", help="Serve this revision: DIGEST or POLICY@DIGEST, with at least 6 hex digits."
    ),
]
From = Annotated[
    Path | None,
    typer.Option("--from", help="Take it from this directory, such as a version downloaded from MLflow."),
]
RegistryUrl = Annotated[
    str | None, typer.Option("--registry", help="Take it from the MLflow server at this URL.")
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", help="URL of an engine; repeatable. Default: the catalog's engines."),
]
Listen = Annotated[str, typer.Option(help="Take requests at this ADDRESS:PORT.")]
Certificate = Annotated[
    Path | None, typer.Option(help="Take HTTPS, with the certificate chain and private key in this PEM file.")
]


@app.command(rich_help_panel=SERVE)
def start(
    service: Annotated[
        str, typer.Argument(help="engine, trainer, controller, mlflow, prefect, worker.", show_default=False)
    ],
    params: ParamsFile = PARAMS,
) -> None:
    """Run one service in the foreground until a signal, for systemd or a container.

    Where it is reached stands in `at`; the worker also installs the Prefect deployments and ends the runs
    that a dead worker has left.
    """
    settings = enter(params)
    command, environment = services.foreground(settings, service)
    if service == services.WORKER:
        from tasks.stuck_runs import free_stuck

        typer.echo(f"{install(settings)} deployments and their automations are installed.")
        # An installation has one worker, and this one has claimed nothing yet.
        now = time.time()
        for dead in free_stuck(settings, now, started=now):
            typer.echo(f"Ended: {dead}.")
    os.execve(command[0], command, environment)


@app.command(rich_help_panel=SERVE)
def migrate(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Create the catalog or migrate it to this version's schema, before services of this version start.

    A catalog of a newer version that this one may use stays as it is.
    """
    settings = enter(params)
    from engine.catalog.catalog import migrate as migrate_catalog
    from engine.catalog.opening import open_catalog

    migrate_catalog(settings.paths.catalog_url)
    with open_catalog(settings.paths) as catalog:
        schema = catalog.access.schema
    print_done(as_json, f"The catalog has schema {schema}.", schema=schema)


@app.command(rich_help_panel=SERVE)
def serve(
    revision: Served, source: From = None, registry: RegistryUrl = None, params: ParamsFile = PARAMS
) -> None:
    """Serve one revision until Ctrl-C, on the running engine or on one started for it."""
    settings = enter(params, registry=registry)
    if not re.fullmatch(r"([a-z][a-z0-9-]*@)?[0-9a-f]{6,64}", revision):
        raise ConfigError(
            f"{revision!r} names no revision. Write DIGEST or POLICY@DIGEST, with at least 6 hex digits."
        )
    from engine.catalog.opening import open_catalog
    from flows.display import base_builder, print_service
    from tasks.serve import bring, prove

    base_builder(settings, Stages())()
    policy, digest = bring(settings, revision, source, registry)
    with open_catalog(settings.paths, migrated=True) as catalog:
        key = catalog.keys.ensure_local(settings.paths.local_key)
    with services.session(settings, lambda: None, print_service, ("engine",)):
        typer.echo(f"Effect probe: {prove(settings, policy, digest, key)}")
        typer.echo(
            f"{served_name(policy, digest)} is served at {settings.url('engine')}/v1; the API key is in "
            f"{settings.paths.local_key}. Stop with Ctrl-C."
        )
        signal.pause()


@app.command(rich_help_panel=SERVE)
def haproxy(
    engine: Engines = None,
    listen: Listen = "127.0.0.1:8470",
    certificate: Certificate = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Print a configuration of HAProxy that spreads requests over engines."""
    settings = enter(params)
    from tasks.haproxy import configuration

    typer.echo(configuration(settings, engine or (), listen, certificate), nl=False)
