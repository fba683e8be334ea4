"""`graftwork haproxy`: the configuration of a load balancer in front of several engines."""

from pathlib import Path
from typing import Annotated

import typer

from flows.entry import PARAMS, ParamsFile, enter

app = typer.Typer()
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", help="URL of an engine; repeatable. Default: the catalog's engines."),
]
Listen = Annotated[str, typer.Option(help="Take requests at this ADDRESS:PORT.")]
Certificate = Annotated[
    Path | None, typer.Option(help="Take HTTPS, with the certificate chain and private key in this PEM file.")
]


@app.command()
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
