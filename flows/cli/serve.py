"""`graftwork serve`: serve one revision from this catalog, a directory or an MLflow registry."""

import re
import signal
from pathlib import Path
from typing import Annotated

import typer

from engine.catalog.records import served_name
from engine.errors import ConfigError
from engine.services import lifecycle as services
from flows.entry import PARAMS, ParamsFile, enter
from tasks.outcome import Stages

app = typer.Typer()
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


@app.command()
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
