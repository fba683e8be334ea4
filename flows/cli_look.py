"""Commands that look and change nothing: status, report."""

import time

import typer

from flows.entry import PARAMS, ParamsFile, enter

app = typer.Typer()


@app.command()
def status(params: ParamsFile = PARAMS) -> None:
    """Show each service: its state, address and age."""
    settings = enter(params)
    from engine import services
    from flows.display import print_status

    print_status(services.status(settings))


@app.command()
def report(params: ParamsFile = PARAMS) -> None:
    """Write the HTML report of everything in the ledger."""
    settings = enter(params)
    from tasks.publish import write_report

    now = time.time()
    path = write_report(settings, settings.paths.runs / "report.html", 0.0, now, {})
    typer.echo(f"The report is {path}.")
