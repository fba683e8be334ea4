"""Say how many engines a traffic needs, and simulate them: what users would see, and what it would cost."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from engine.adapters.adapter_sizes import packed_blocks
from engine.base.families import BaseShapes
from engine.base.resident import base_config
from engine.errors import ConfigError
from engine.planning.fleet.assumptions import EngineModel, FleetOutcome, Scenario, StoreModel
from engine.planning.fleet.search import capacity, fewest
from engine.planning.fleet.simulation import simulate
from engine.planning.gpu import cuda_bytes
from engine.planning.memory import DTYPE_BYTES
from engine.planning.tiers import host_tier_adapters, host_tier_bytes
from engine.settings.params import Params


def read_models(file: Path | None) -> tuple[EngineModel, StoreModel]:
    """Return the models with the values of a JSON file: fields of `EngineModel` and of `StoreModel`."""
    engine, store = EngineModel(), StoreModel()
    if file is None:
        return engine, store
    try:
        given = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no file {file}. Write one, or leave --calibrate out.") from None
    except OSError as error:
        raise ConfigError(f"--calibrate {file} cannot be read: {error.strerror}. Give a JSON file.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{file} must hold an object, such as {{"step_s": 0.02}}.')
    known = {
        field.name: type(getattr(model, field.name)) for model in (engine, store) for field in fields(model)
    }
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{file} has {name!r}, which is none of {', '.join(known)}.")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (known[name] is int and (value != int(value) or value < 1)):
            wanted = "a whole number from 1" if known[name] is int else "a number from 0"
            raise ConfigError(f"{name} in {file} is {value!r}. Give {wanted}.")
    for name in ("faults", "step_spread"):
        if given.get(name, 0) >= 1:
            raise ConfigError(f"{name} in {file} is {given[name]}. Give a number below 1.")
    engine = replace(engine, **_of(engine, given))
    if engine.step_s + engine.token_s <= 0:
        raise ConfigError(f"{file}: a step must take time. Give `step_s` or `token_s`.")
    return engine, replace(store, **_of(store, given))


def _of(model: EngineModel | StoreModel, given: dict[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in fields(model) if field.name in given}


def held_adapters(params: Params) -> int:
    """Return how many adapters of `engine.max_rank` an engine's host tier holds."""
    shapes = BaseShapes.of(base_config(params.base, params.paths))
    config = params.engine
    itemsize = DTYPE_BYTES[config.dtype_on(cuda=bool(cuda_bytes()))]
    each = sum(packed_blocks(shapes, config.max_rank, itemsize, None))
    return max(1, min(host_tier_bytes(config) // each, host_tier_adapters(config)))


def size(
    scenario: Scenario, within_s: float, engine: EngineModel, store: StoreModel
) -> tuple[int, list[FleetOutcome], list[str]]:
    """Return the fewest engines, outcomes of numbers around it, and sentences that say why."""

    def simulated(count: int) -> FleetOutcome:
        return simulate(replace(scenario, engines=count), engine, store)

    count, outcomes = fewest(scenario, engine, within_s, simulated)
    for more in (count + 1, count + 2):
        outcomes[more] = outcomes.get(more) or simulated(more)
    down = [f"{scenario.kill} of them down"] * bool(scenario.kill) + ["one restarting"] * scenario.wave
    found, fewer = outcomes[count], outcomes.get(count - 1)
    if fewer is None:
        why = "none would be left"
    elif not fewer.keeps_up or math.isnan(fewer.first_token_p95_s):
        why = f"requests pile up, {fewer.left} wait at the end"
    else:
        why = f"it takes {fewer.first_token_p95_s:.2f} s"
    told = [
        f"{count} engines{' with ' * bool(down)}{' and '.join(down)}: 95% of requests have their first token "
        f"within {found.first_token_p95_s:.2f} s ({within_s:g} s wished for).",
        f"{count - 1} are too few: {why}.",
        f"An engine answers at most {capacity(engine):.3g} requests a second of one policy, "
        f"{capacity(engine, engine.rows):.3g} where each is of another ({engine.prompt} tokens in, "
        f"{engine.answer} out).",
        f"It holds {scenario.host} of {scenario.policies} adapters: {found.cold:.1%} of requests wait for "
        "a load.",
    ]
    return count, [outcomes[each] for each in sorted(outcomes)], told


def sweep(
    scenario: Scenario,
    counts: Sequence[int],
    placements: Sequence[bool],
    engine: EngineModel,
    store: StoreModel,
) -> list[FleetOutcome]:
    """Return the outcome for each number of engines under each placement: with affinity, or by chance.

    Raises `ConfigError` for a number of engines that the scenario leaves none of.
    """
    for count in counts:
        if count - scenario.wave <= scenario.kill:
            raise ConfigError(
                f"With --kill {scenario.kill}{' and --wave' * scenario.wave} none of {count} replicas is "
                "left. Give more replicas."
            )
    return [
        simulate(replace(scenario, engines=count, affinity=affinity), engine, store)
        for affinity in placements
        for count in counts
    ]


def as_json(outcomes: Sequence[FleetOutcome]) -> list[dict[str, Any]]:
    """Return outcomes as JSON values: what nobody measured is null."""
    told = [
        asdict(one) | {"keeps_up": one.keeps_up, "replica_hours_a_million": one.hours_a_million}
        for one in outcomes
    ]
    return [{name: None if value != value else value for name, value in each.items()} for each in told]


def row(outcome: FleetOutcome) -> dict[str, str]:
    """Return an outcome's line of the table."""
    return {
        "replicas": str(outcome.engines),
        "placed by": "affinity" if outcome.affinity else "chance",
        "cold": f"{outcome.cold:.1%}",
        "first token p50 / p95, s": f"{outcome.first_token_p50_s:.2f} / {outcome.first_token_p95_s:.2f}",
        "answer p50 / p95, s": f"{outcome.answer_p50_s:.2f} / {outcome.answer_p95_s:.2f}",
        "busy": f"{outcome.busy:.0%}",
        "batch": f"{outcome.rows:.0%}",
        "replica-hours a million": f"{outcome.hours_a_million:.1f}",
        "keeps up": "yes" if outcome.keeps_up else f"no, {outcome.left} wait",
    }


def refuse_unless_writable(option: str, file: Path) -> None:
    """Raise `ConfigError` unless the file of this option can be written."""
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no directory {file.parent}. Make it first.")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {file} cannot be written. Give a file that you may write.")


def refuse_unless_plottable(file: Path) -> None:
    """Raise `ConfigError` unless `plot` can write this file."""
    if file.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {file} must end in .png or .svg.")
    refuse_unless_writable("--plot", file)


def plot(outcomes: Sequence[FleetOutcome], file: Path, within_s: float | None = None) -> None:
    """Draw the p95 to the first token, cold requests and cost by number of replicas, as PNG or SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for affinity, name in ((True, "affinity"), (False, "chance")):
        some = [one for one in outcomes if one.affinity == affinity]
        if some:
            counts = [one.engines for one in some]
            left.plot(counts, [one.first_token_p95_s for one in some], marker="o", label=name)
            right.plot(counts, [one.cold for one in some], marker="o", label=name)
    if within_s is not None:
        left.axhline(within_s, color="grey", linestyle=":", label="wished for")
    left.set(xlabel="replicas", ylabel="p95 to the first token, s", yscale="log")
    right.set(xlabel="replicas", ylabel="share of cold requests", ylim=(0, 1))
    cost = right.twinx()
    each = {one.engines: one.hours_a_million for one in outcomes}
    cost.plot(sorted(each), [each[count] for count in sorted(each)], color="grey", linestyle="--")
    cost.set_ylabel("replica-hours a million requests (dashed)")
    cost.set_ylim(bottom=0)
    left.legend(), right.legend()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
