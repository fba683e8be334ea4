"""The command that serves one revision, from wherever it was made."""

import re
import signal
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError
from engine.services import lifecycle as services
from engine.settings.params import served_name
from flows.entry import PARAMS, ParamsFile, enter
from tasks.outcome import Stages

app = typer.Typer()
Served = Annotated[
    str, typer.Option("--revision", help="DIGEST or POLICY@DIGEST; the digest may be shortened.")
]
From = Annotated[
    Path | None, typer.Option("--from", help="Its directory, such as a version downloaded from MLflow.")
]
RegistryUrl = Annotated[str | None, typer.Option("--registry", help="An MLflow server that has it.")]


@app.command()
def serve(
    revision: Served, source: From = None, registry: RegistryUrl = None, params: ParamsFile = PARAMS
) -> None:
    """Serve one revision here, on the engine that runs or on one of its own, until Ctrl-C."""
    settings = enter(params)
    if not re.fullmatch(r"([a-z][a-z0-9-]*@)?[0-9a-f]{6,64}", revision):
        raise ConfigError(
            f"{revision!r} names no revision; write DIGEST or POLICY@DIGEST, 6 digits at least."
        )
    from engine.catalog.catalog import open_catalog
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
            f"{settings.paths.local_key}. Ctrl-C ends it."
        )
        signal.pause()
