"""The command that plans one GPU's memory; it works on a machine without one."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from engine.errors import ConfigError
from flows.entry import PARAMS, Json, ParamsFile, enter

app = typer.Typer()
Memory = Annotated[
    float | None,
    typer.Option(min=0.1, help="Plan for a GPU with so many GiB; without it, for the one of this machine."),
]


@app.command("plan")
def plan_memory(memory_gib: Memory = None, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show what trainer and engine need of one GPU, and refuse settings that do not fit."""
    settings = enter(params)
    from engine import gpu
    from engine.memory import GIB, refuse_unless_it_fits

    available = int(memory_gib * GIB) if memory_gib else gpu.cuda_bytes()
    if available is None:
        raise ConfigError("torch sees no GPU here; give the memory of one with --memory-gib.")
    config, found = gpu.plan_for(settings, available)
    if as_json:
        share = found.gpu_memory_utilization
        typer.echo(json.dumps(asdict(found) | {"needed": found.needed, "gpu_memory_utilization": share}))
    else:
        gpu.say(found)
    refuse_unless_it_fits(config, found, settings.engine, settings.trainer)
