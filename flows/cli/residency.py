"""`graftwork residency`: where each adapter is now."""

from collections.abc import Mapping
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
    from flows.display import console, print_row, print_rows

    if not found["engine"]:
        typer.echo("No engine is running, so every revision is `stored`.")
    facts = {name: _listed(tier) for name, tier in found["tiers"].items()}
    facts |= {name: _listed(found[name]) for name in ("queue", "states") if found[name]}
    for made in found["transitions"]:
        facts[f"{made['before']} -> {made['after']}"] = f"{made['event']} {made['count']:,}"
    print_row(facts)
    print_rows([tiers.shown(row) for row in found["revisions"]], fold=("revision",))
    for row in found["quarantined"]:
        console.print(f"{row['revision']} is in quarantine: {row['reason']}", markup=False)
    for row in found["revisions"]:
        if row.get("last_fault"):
            console.print(f"{row['revision']}: {row['last_fault']}", markup=False)


def _listed(counts: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count is not None)
