"""`graftwork simulate`: how many engines a traffic needs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.errors import ConfigError
from engine.planning.fleet.model import Scenario
from flows.entry import Json

app = typer.Typer()
Replicas = Annotated[str, typer.Option(help="Simulate these numbers of engines, by commas.")]
Policies = Annotated[int, typer.Option(min=1, max=10_000_000, help="Number of policies.")]
Rate = Annotated[float, typer.Option(min=0.1, max=1e5, help="Requests a second to all engines together.")]
Zipf = Annotated[float, typer.Option(min=0, max=3, help="Exponent of the policies' popularity.")]
Host = Annotated[int, typer.Option(min=1, max=1_000_000, help="Adapters that an engine's host tier holds.")]
Seconds = Annotated[float, typer.Option(min=10, max=86_400, help="Simulate this many seconds.")]
Place = Annotated[
    Literal["both", "affinity", "chance"],
    typer.Option(
        metavar="WORD", help="Place policies by HAProxy's consistent hash with bounded load, or by chance."
    ),
]
Kill = Annotated[
    int, typer.Option(min=0, max=10_000, help="End this many engines after a third of the time.")
]
Wave = Annotated[
    bool,
    typer.Option("--wave", help="Drain and restart one engine after another, after a third of the time."),
]
Fetch = Annotated[
    float | None,
    typer.Option(
        min=0, max=600, help="Median seconds of a fetch from the store. Default: 0.06, an assumption."
    ),
]
Faults = Annotated[
    float | None, typer.Option(min=0, max=0.9, help="Share of fetches that fail. Default: 0.001.")
]
Calibrate = Annotated[
    Path | None,
    typer.Option(help="Read the engine's and the store's times from this JSON file; see docs/scale-out.md."),
]
Check = Annotated[bool, typer.Option("--check", help="Compare the model with what `bench storm` measured.")]
Plot = Annotated[Path | None, typer.Option(help="Write a plot to this .png or .svg file.")]
Seed = Annotated[int, typer.Option(min=0, help="Draw traffic from this seed.")]


@app.command()
def simulate(
    replicas: Replicas = "64",
    policies: Policies = 1_000_000,
    rate: Rate = 512.0,
    zipf: Zipf = 0.9,
    host: Host = 4096,
    seconds: Seconds = 120.0,
    place: Place = "both",
    kill: Kill = 0,
    wave: Wave = False,
    fetch_s: Fetch = None,
    faults: Faults = None,
    calibrate: Calibrate = None,
    check: Check = False,
    plot: Plot = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Simulate engines under traffic: cold requests, latency, use and cost by number of replicas."""
    from flows.display import print_rows
    from tasks import simulate as task

    engine, store = task.read_models(calibrate)
    store = replace(
        store,
        fetch_s=store.fetch_s if fetch_s is None else fetch_s,
        faults=store.faults if faults is None else faults,
    )
    if check:
        from engine.planning.fleet.storm import compare

        compared = compare(engine)
        if as_json:
            return typer.echo(
                json.dumps([{**vars(one), "off": one.off, "holds": one.holds} for one in compared])
            )
        return print_rows([task.check_row(one) for one in compared])
    scenario = Scenario(
        policies=policies, rate=rate, zipf=zipf, host=host, seconds=seconds, kill=kill, wave=wave, seed=seed
    )
    placements = {"both": (True, False), "affinity": (True,), "chance": (False,)}[place]
    found = task.sweep(scenario, counts_of(replicas), placements, engine, store)
    if plot:
        task.plot(found, plot)
    if as_json:
        return typer.echo(json.dumps([task.as_json(one) for one in found]))
    print_rows([task.row(one) for one in found])


def counts_of(text: str) -> list[int]:
    """Return the numbers of replicas, each once and in order."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 4096 for part in parts):
        raise ConfigError(
            f"--replicas {text!r} must be whole numbers from 1 to 4096, by commas, such as 48,64."
        )
    return sorted({int(part) for part in parts})
