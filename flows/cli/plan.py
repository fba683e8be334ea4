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
from engine.planning.fleet.assumptions import MOST, Scenario
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
Replicas = Annotated[str | None, typer.Option(help="Only show these numbers of engines, by commas.")]
Policies = Annotated[int, typer.Option(min=1, max=10_000_000, help="Number of policies.")]
Rate = Annotated[float, typer.Option(min=0.1, max=1e5, help="Requests a second to all engines together.")]
Prompt = Annotated[
    int | None, typer.Option(min=1, max=131_072, help="Tokens of a prompt. Default: the file's, or 8.")
]
Answer = Annotated[
    int | None, typer.Option(min=2, max=32_768, help="Tokens of an answer. Default: the file's, or 4.")
]
Within = Annotated[float, typer.Option(min=0.001, help="95% of first tokens come within these seconds.")]
Zipf = Annotated[float, typer.Option(min=0, max=3, help="Exponent of the policies' popularity.")]
Host = Annotated[
    int | None,
    typer.Option(min=1, help="Adapters that an engine holds. Default: what engine.host_bytes holds."),
]
Seconds = Annotated[float, typer.Option(min=10, max=86_400, help="Simulate this many seconds.")]
Place = Annotated[
    Literal["both", "affinity", "chance"],
    typer.Option(
        metavar="WORD", help="Place policies by HAProxy's consistent hash with bounded load, or by chance."
    ),
]
Kill = Annotated[
    int | None,
    typer.Option(min=0, max=1000, help="End so many engines on the way. Default: 1; with --replicas, 0."),
]
Wave = Annotated[
    bool,
    typer.Option("--wave", help="Drain and restart one engine after another, after a third of the time."),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(help="Read the engine's and the store's times from this JSON file; see docs/scale-out.md."),
]
Measure = Annotated[Path | None, typer.Option(help="Measure the running engine; write such a file.")]
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
    rate: Rate = 512.0,
    policies: Policies = 1_000_000,
    zipf: Zipf = 0.9,
    prompt: Prompt = None,
    answer: Answer = None,
    within_s: Within = 2.0,
    host: Host = None,
    replicas: Replicas = None,
    seconds: Seconds = 120.0,
    place: Place = "affinity",
    kill: Kill = None,
    wave: Wave = False,
    measure: Measure = None,
    calibrate: Calibrate = None,
    plot: Plot = None,
    seed: Seed = 0,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Say how many engines a traffic needs, by a simulation: first tokens in time with one engine down.

    With --replicas, show what users would see of these numbers of engines.
    """
    from tasks import fleet_plan as task

    if place == "both" and replicas is None:
        raise ConfigError(
            "--place both compares numbers of engines that you give. Give --replicas, or one placement."
        )
    if plot:
        task.refuse_unless_plottable(plot)
    engine, store = task.read_models(calibrate)
    engine = replace(engine, prompt=prompt or engine.prompt, answer=answer or engine.answer)
    if measure:
        from tasks.engine_times import measure as measured

        found = measured(enter(params), engine.prompt, engine.answer, measure)
        return print_result(as_json, found, [{name: f"{value:g}" for name, value in found.items()}])
    scenario = Scenario(
        policies=policies, rate=rate, zipf=zipf, seconds=seconds, wave=wave, seed=seed,
        kill=int(replicas is None) if kill is None else kill, affinity=place != "chance",
        host=host or task.held_adapters(enter(params)),
    )  # fmt: skip
    if replicas is None:
        count, results, told = task.size(scenario, within_s, engine, store)
        value: object = {"engines": count, "because": told, "simulated": task.as_json(results)}
    else:
        placements = {"both": (True, False), "affinity": (True,), "chance": (False,)}[place]
        results = task.sweep(scenario, counts_of(replicas), placements, engine, store)
        told, value = [], task.as_json(results)
    if plot:
        task.plot(results, plot, None if replicas else within_s)
    if told and not as_json:
        typer.echo("\n".join(told))
    print_result(as_json, value, [task.row(one) for one in results])


def counts_of(text: str) -> list[int]:
    """Return the numbers of replicas, each once and in order."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= MOST for part in parts):
        raise ConfigError(
            f"--replicas {text!r} must be whole numbers from 1 to {MOST}, by commas, such as 48,64."
        )
    return sorted({int(part) for part in parts})
