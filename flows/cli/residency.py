"""`graftwork residency`: where each adapter is now."""

from typing import Annotated

import typer

from flows.cli.look import print_json
from flows.entry import PARAMS, Json, ParamsFile, enter

app = typer.Typer()
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many revisions.")]


@app.command()
def residency(limit: Limit = 50, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show the tiers (stored, host, slot), the cold load queue, and loads and waits of each revision."""
    settings = enter(params)
    from tasks import residency as tiers

    found = tiers.residency(settings, limit)
    if as_json:
        return print_json(found)
    from flows.display import print_row, print_rows

    if not found["engine"]:
        typer.echo("No engine is running, so every revision is `stored`.")
    for name, tier in found["tiers"].items():
        print_row({name: ", ".join(f"{key} {value:,}" for key, value in tier.items() if value is not None)})
    if found["queue"]:
        print_row({"queue": ", ".join(f"{key} {value}" for key, value in found["queue"].items())})
    if found["states"]:
        print_row({"states": ", ".join(f"{state} {count}" for state, count in found["states"].items())})
    for made in found["transitions"]:
        print_row({f"{made['before']} -> {made['after']}": f"{made['event']} {made['count']:,}"})
    print_rows([tiers.shown(row) for row in found["revisions"]])
