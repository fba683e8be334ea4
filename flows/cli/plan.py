"""The command that plans memory: one GPU for trainer and engine, or adapters of any model's config.

It works on a machine without a GPU.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.base.model_config import read_config
from engine.errors import ConfigError
from engine.planning.memory import GIB, refuse_unless_it_fits
from engine.settings.params import Params
from flows.entry import PARAMS, Json, ParamsFile, enter

app = typer.Typer()
Memory = Annotated[
    float | None,
    typer.Option(min=0.1, help="Plan for a GPU with so many GiB; without it, for the one of this machine."),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="A model's config.json: plan its adapters instead.")
]
Rank = Annotated[int | None, typer.Option(help="With --config: of the adapters. Default: engine.max_rank.")]
Slots = Annotated[int | None, typer.Option(min=1, help="With --config. Default: engine.slots.")]
Dtype = Annotated[str | None, typer.Option(help="With --config: bfloat16 or float32. Default: engine.dtype.")]
Targets = Annotated[str | None, typer.Option(help="With --config: projections with LoRA, by commas; all.")]
Devices = Annotated[
    int | None,
    typer.Option("--tensor-parallel", min=1, max=64, help="With --config. Default: the fewest that fit."),
]
Bits = Annotated[
    float | None, typer.Option(min=1, max=32, help="With --config: of a base's weight. Default: as it says.")
]
LoadRate = Annotated[
    float | None,
    typer.Option(min=0.01, help="With --config: GB/s from host to slot. Default: 15.3, measured."),
]
ReadRate = Annotated[
    float | None,
    typer.Option(min=0.01, help="With --config: GB/s of the store's disk. Default: 1.9, measured."),
]


@app.command("plan")
def plan_memory(
    memory_gib: Memory = None,
    config: Config = None,
    rank: Rank = None,
    slots: Slots = None,
    dtype: Dtype = None,
    targets: Targets = None,
    tensor_parallel: Devices = None,
    weight_bits: Bits = None,
    load_gb_s: LoadRate = None,
    read_gb_s: ReadRate = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Show what trainer and engine need of one GPU, and refuse settings that do not fit.

    With --config: what adapters of that model take, over how many devices it is cut, and how long a load is;
    without a GPU and --memory-gib, what one device would need.
    """
    settings = enter(params)
    from engine.planning import gpu

    available = int(memory_gib * GIB) if memory_gib else gpu.cuda_bytes()
    asked = {
        "rank": rank, "slots": slots, "dtype": dtype, "targets": targets, "tensor_parallel": tensor_parallel,
        "weight_bits": weight_bits, "load_gb_s": load_gb_s, "read_gb_s": read_gb_s,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    if config is not None:
        return plan_config(settings, config, available, given, as_json)
    if given:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} goes with --config CONFIG.json.")
    if available is None:
        raise ConfigError("torch sees no GPU here; give the memory of one with --memory-gib.")
    base, found = gpu.plan_for(settings, available)
    if as_json:
        share = found.gpu_memory_utilization
        typer.echo(json.dumps(asdict(found) | {"needed": found.needed, "gpu_memory_utilization": share}))
    else:
        gpu.say(found)
    refuse_unless_it_fits(base, found, settings.engine, settings.trainer)


def plan_config(
    settings: Params, file: Path, available: int | None, given: Mapping[str, Any], as_json: bool
) -> None:
    """Show the plan of the adapters of the model whose `config.json` this is."""
    from engine.planning.adapters import Rates, Wanted, plan_adapters, say

    changes = {name: given[name] for name in ("slots", "dtype") if name in given}
    if changes.get("dtype", "float32") not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype is bfloat16 or float32, not {given['dtype']!r}.")
    engine = settings.engine.model_copy(update=changes)
    rates = {name: given[f"{name}_gb_s"] * 1e9 for name in ("load", "read") if f"{name}_gb_s" in given}
    targets = tuple(given["targets"].split(",")) if "targets" in given else None
    wanted = Wanted(
        given.get("rank", engine.max_rank), available, given.get("tensor_parallel"),
        given.get("weight_bits"), targets, Rates(**rates),
    )  # fmt: skip
    found = plan_adapters(read_config(file), engine, wanted)
    if as_json:
        return typer.echo(json.dumps(asdict(found) | {"needed": found.needed}))
    say(found)
