"""`graftwork plan`: the memory of one GPU, the adapters of any model, and how many engines a traffic needs.

Works on a machine without a GPU and without services.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.base.model_config import read_config
from engine.errors import ConfigError
from engine.planning import gpu
from engine.planning.fleet.assumptions import Scenario
from engine.planning.memory import GIB, refuse_unless_it_fits
from flows.entry import PARAMS, Json, ParamsFile, enter, print_json, print_result

app = typer.Typer()
plan_app = typer.Typer(
    help="Plan memory, adapters and engines before you pay for them.", no_args_is_help=True
)
MEASURE = "Plan and measure"
app.add_typer(plan_app, name="plan", rich_help_panel=MEASURE)
Memory = Annotated[
    float | None,
    typer.Option(min=0.1, help="Plan for a GPU with this many GiB. Default: this machine's GPU."),
]
Rank = Annotated[int | None, typer.Option(help="Plan adapters of this rank. Default: engine.max_rank.")]
Slots = Annotated[
    int | None, typer.Option(min=1, help="Plan this many adapter slots. Default: engine.slots.")
]
Dtype = Annotated[
    Literal["bfloat16", "float32"] | None,
    typer.Option(metavar="bfloat16|float32", help="Plan this dtype. Default: engine.dtype."),
]
Targets = Annotated[str | None, typer.Option(help="Plan LoRA on these projections, by commas. Default: all.")]
Devices = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Plan for this many devices. Default: the fewest that fit."),
]
Bits = Annotated[
    float | None,
    typer.Option(min=1, max=32, help="Plan base weights of this many bits. Default: from config.json."),
]
LoadRate = Annotated[
    float, typer.Option("--load-gb-s", min=0.01, help="Assume this host-to-slot rate, GB/s.")
]
ReadRate = Annotated[
    float, typer.Option("--read-gb-s", min=0.01, help="Assume this read rate of the store's disk, GB/s.")
]
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


@plan_app.command("memory")
def plan_memory(memory_gib: Memory = None, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Plan the memory of trainer and engine on one GPU; fail where the settings do not fit."""
    settings = enter(params)
    available = int(memory_gib * GIB) if memory_gib else gpu.cuda_bytes()
    if available is None:
        raise ConfigError("torch sees no GPU here. Give the memory of one with --memory-gib.")
    base, plan = gpu.plan_for(settings, available)
    if as_json:
        share = plan.gpu_memory_utilization
        print_json(asdict(plan) | {"needed": plan.needed, "gpu_memory_utilization": share})
    else:
        gpu.say(plan)
    refuse_unless_it_fits(base, plan, settings.engine, settings.trainer)


@plan_app.command("adapters")
def plan_adapters(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The model's config.json.")],
    memory_gib: Memory = None,
    rank: Rank = None,
    slots: Slots = None,
    dtype: Dtype = None,
    targets: Targets = None,
    tensor_parallel: Devices = None,
    weight_bits: Bits = None,
    load_gb_s: LoadRate = 15.3,
    read_gb_s: ReadRate = 1.9,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Plan the adapters of any model: bytes of each, tensor-parallel degree, load time.

    Without a GPU and --memory-gib, print what one device would need.
    """
    settings = enter(params)
    from engine.planning import adapters

    changes = {name: value for name, value in (("slots", slots), ("dtype", dtype)) if value}
    wanted = adapters.Wanted(
        settings.engine.max_rank if rank is None else rank,
        int(memory_gib * GIB) if memory_gib else gpu.cuda_bytes(),
        tensor_parallel, weight_bits, tuple(targets.split(",")) if targets else None,
        adapters.Rates(load=load_gb_s * 1e9, read=read_gb_s * 1e9),
    )  # fmt: skip
    plan = adapters.plan_adapters(read_config(config), settings.engine.model_copy(update=changes), wanted)
    if as_json:
        return print_json(asdict(plan) | {"needed": plan.needed})
    adapters.say(plan)


@plan_app.command("engines")
def plan_engines(
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
    from tasks import fleet_plan as task

    engine, store = task.read_models(calibrate)
    store = replace(
        store,
        fetch_s=store.fetch_s if fetch_s is None else fetch_s,
        faults=store.faults if faults is None else faults,
    )
    if check:
        from engine.planning.fleet.storm import compare

        compared = compare(engine)
        values = [{**vars(one), "off": one.off, "holds": one.holds} for one in compared]
        return print_result(as_json, values, [task.check_row(one) for one in compared])
    scenario = Scenario(
        policies=policies, rate=rate, zipf=zipf, host=host, seconds=seconds, kill=kill, wave=wave, seed=seed
    )
    placements = {"both": (True, False), "affinity": (True,), "chance": (False,)}[place]
    results = task.sweep(scenario, counts_of(replicas), placements, engine, store)
    if plot:
        task.plot(results, plot)
    print_result(as_json, [task.as_json(one) for one in results], [task.row(one) for one in results])


def counts_of(text: str) -> list[int]:
    """Return the numbers of replicas, each once and in order."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 4096 for part in parts):
        raise ConfigError(
            f"--replicas {text!r} must be whole numbers from 1 to 4096, by commas, such as 48,64."
        )
    return sorted({int(part) for part in parts})
