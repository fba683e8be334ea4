"""`graftwork plan`: memory of trainer and engine on one GPU, or of adapters for any model's config.

Works on a machine without a GPU.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.base.model_config import read_config
from engine.errors import ConfigError
from engine.planning import gpu
from engine.planning.memory import GIB, refuse_unless_it_fits
from engine.settings.params import Params
from flows.entry import PARAMS, Json, ParamsFile, enter

app = typer.Typer()
Memory = Annotated[
    float | None,
    typer.Option(min=0.1, help="Plan for a GPU with this many GiB. Default: this machine's GPU."),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="Plan the adapters of the model with this config.json.")
]
Rank = Annotated[
    int | None, typer.Option(help="With --config: plan adapters of this rank. Default: engine.max_rank.")
]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="With --config: plan this many adapter slots. Default: engine.slots."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="With --config: plan this dtype, bfloat16 or float32. Default: engine.dtype."),
]
Targets = Annotated[
    str | None, typer.Option(help="With --config: plan LoRA on these projections, by commas. Default: all.")
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel",
        min=1,
        max=64,
        help="With --config: plan for this many devices. Default: the fewest that fit.",
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        min=1, max=32, help="With --config: plan base weights of this many bits. Default: from config.json."
    ),
]
LoadRate = Annotated[
    float | None,
    typer.Option(min=0.01, help="With --config: assume this host-to-slot rate, GB/s. Default: 15.3."),
]
ReadRate = Annotated[
    float | None,
    typer.Option(
        min=0.01, help="With --config: assume this read rate of the store's disk, GB/s. Default: 1.9."
    ),
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
    """Plan the memory of trainer and engine on one GPU; fail where the settings do not fit.

    With --config: plan the adapters of that model instead: bytes of each, tensor-parallel degree, load time.
    Without a GPU and --memory-gib, print what one device would need.
    """
    settings = enter(params)

    available = int(memory_gib * GIB) if memory_gib else gpu.cuda_bytes()
    asked = {
        "rank": rank, "slots": slots, "dtype": dtype, "targets": targets, "tensor_parallel": tensor_parallel,
        "weight_bits": weight_bits, "load_gb_s": load_gb_s, "read_gb_s": read_gb_s,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    if config is not None:
        return plan_config(settings, config, available, given, as_json)
    if given:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} goes with --config CONFIG.json; add it.")
    if available is None:
        raise ConfigError("torch sees no GPU here. Give the memory of one with --memory-gib.")
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
    """Print the plan for adapters of the model with this `config.json`."""
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
