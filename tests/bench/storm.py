"""Cold adapters that arrive while others are served: what warm requests feel of it.

    graftwork bench storm [--base tiny-dense --base many-moe | --base smollm2-135m] [--cold 32 256]
                          [--repeats 10] [--no-stock] [--no-density] [--drop-cache]

Warm requests arrive all the time (Poisson, at 40% of what the engine can do, which is found first). In a
storm N requests arrive at once for N adapters that nobody ever asked for; in its control the same N requests
go to resident adapters, which have a slot each. Storm and control alternate with the same arrivals and
prompts, and traffic without either goes between them. `ratio` is warm TTFT p95 in storms over controls, of
the same warm requests: those that arrive between the first cold arrival and the last cold first token.
`over_calm` and `control_over_calm` are those of storms and of controls over traffic without a burst. An
open-loop client in a process of its own measures, by streams; it honours `Retry-After`, and counts each 429.
vLLM's own loader runs the same storms in the same run, at 40% of its own saturation. The engine has its
default settings but for base, dtype and rank; N is at most what its slots and its host tier hold. Figures
bear base and N in their names. `evictions` counts the adapters that left the host tier meanwhile. With
--drop-cache a storm's adapters are not in the page cache, and `disk_read_s` is how long one plain read of
their files takes, before each storm.

Some cold answers of each alternation must be what their adapters give alone, and mostly neither what the
base nor what another adapter says. Red too: any request that does not end in 200, and an adapter that
starves, which is one that waits for more than three times the median of the storms' windows.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import _answers
import _density
import _made
import _record as record
import _served
from _storm_figures import Arms, errors, faults, refusals
from _storm_side import WARM, Side
from _traffic import Client, Server

from engine.base.families import BaseShapes
from engine.planning.tiers import cpu_slots, host_tier_bytes
from engine.settings.params import Params, load_params
from engine.settings.services import EngineConfig

BASES = ("tiny-dense", "many-moe")
# Tokens of a prompt and of its answer; a step of many-moe reads a gigabyte of experts.
LENGTHS = {"tiny-dense": (24, 8), "many-moe": (8, 4), "smollm2-135m": (24, 8)}
# Warm requests to count in each arm: at 500 a ratio of their p95 is known to a third, and a window of
# tiny-dense holds 20.
LEAST, STOCK_REPEATS = {"tiny-dense": 1500, "many-moe": 500, "smollm2-135m": 500}, 3
# Of written adapters that stay on the disk; older ones are asked for no more.
KEPT_BYTES = 12 << 30
LIMITS = {32: 1.15, 256: 1.3}
# Slots and places of the host tier that a storm leaves free.
SPARE = 8
# Without suffixes; `ready_32_over_warm` is the worst `ready_over_warm` of 32.
BOUNDS = {
    "ratio": record.at_most(),
    "over_calm": record.at_most(),
    "control_over_calm": record.at_most(),
    "ready_32_over_warm": record.at_most(1.5),
    "errors": record.within(0),
    "density": record.at_most(1.1),
}
# How far answers may be off their adapters' alone, nats, and how many must not be. In float32 a dense base
# says the same in any batch; bfloat16 rounds anew in each, and may choose other experts then.
TOLERANCE_NATS = {"tiny-dense": 1e-3, "many-moe": 0.1, "smollm2-135m": 1e-3}
LEAST_OWN = {"tiny-dense": 1.0, "many-moe": 0.9, "smollm2-135m": 1.0}


@dataclass
class Result:
    """What a run found."""

    figures: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    bounds: dict[str, record.Bound] = field(default_factory=lambda: dict(BOUNDS))

    def add(self, arms: Arms, base: str, cold: int, tail: str = "") -> None:
        """Take an arm's figures, by names with base and N; `tail` says on which server."""
        values, spreads = arms.figures()
        values |= _answers.figures_of(arms.checks, TOLERANCE_NATS[base])
        self.figures |= {f"{name}{tail}.{base}.n{cold}": value for name, value in values.items()}
        self.spreads |= {f"{name}{tail}.{base}.n{cold}": text for name, text in spreads.items()}


def sums(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of all bases: the slowest burst of 32, and every error of our engines."""
    ready = [
        value
        for name, value in figures.items()
        if name.startswith("ready_over_warm.") and name.endswith(".n32")
    ]
    errors_of_ours = sum(value for name, value in figures.items() if name.startswith("errors."))
    return {"errors": errors_of_ours} | ({"ready_32_over_warm": max(ready)} if ready else {})


def sizes(asked: Sequence[int], most: int) -> dict[int, float]:
    """Return the N of the storms, each at most `most`, with the limit on its ratio: infinite without one."""
    return {min(n, most): LIMITS.get(n, math.inf) for n in sorted(asked)}


def most_cold(engine: EngineConfig, shapes: BaseShapes, adapter_bytes: int) -> int:
    """Return how many adapters can arrive at once while as many are resident, and the warm ones too."""
    held = min(host_tier_bytes(engine) // adapter_bytes, engine.host_adapters)
    return min(cpu_slots(engine, shapes) - WARM - SPARE, (held - WARM - SPARE) // 2)


def ours(
    given: Params, base: str, client: Client, arguments: argparse.Namespace, result: Result
) -> dict[int, float]:
    """Run the storms on our engine; return their sizes with the limits."""
    shape = _served.SHAPES[base]
    with ExitStack() as stack:
        engine = stack.enter_context(_served.live(given, base, beside(arguments)))
        maker = _made.Maker(engine.params, engine.base, "storm", shape.rank, shape.torch_dtype)
        stack.callback(maker.close)
        config, shapes = engine.params.engine, BaseShapes.read(engine.base.path)
        cold = sizes(arguments.cold, most_cold(config, shapes, maker.bytes))
        result.bounds |= {f"ratio.{base}.n{n}": record.at_most(limit) for n, limit in cold.items()}
        side = Side(
            "ours", engine.base.name, client, engine.server, maker.make, random.Random(1), max(cold),
            LENGTHS[base],
        )  # fmt: skip
        kept, read_s = len(maker.segments), list[float]()
        side.find_rate()

        def before_storm() -> None:
            fresh = maker.segments[kept:]
            if arguments.drop_cache:
                read_s.append(_made.read_from_disk(maker.newest))
                _made.drop_cache(fresh)
            while sum(path.stat().st_size for path in fresh) > KEPT_BYTES:
                maker.remove([fresh.pop(0)])

        for n in cold:
            repeats, least = arguments.repeats, LEAST[base] if arguments.least is None else arguments.least
            evicted = _served.evictions(engine.server)
            read_s.clear()
            arms = side.alternate(n, repeats, least, before_storm)
            name = f"{base}, {n} cold"
            result.wrong += faults(name, arms, repeats, least)
            result.wrong += _answers.faults(name, arms.checks, TOLERANCE_NATS[base], LEAST_OWN[base])
            result.add(arms, base, n)
            result.figures[f"evictions.{base}.n{n}"] = float(_served.evictions(engine.server) - evicted)
            if read_s:
                result.figures[f"disk_read_s.{base}.n{n}"] = record.median(read_s)
                result.spreads[f"disk_read_s.{base}.n{n}"] = record.spread(read_s)
            told(result, base, n)
        failed = [one for one in side.answers if not one.is_right]
        result.figures |= {
            f"slots.{base}": float(cpu_slots(config, shapes)),
            f"errors.{base}": float(len(failed)),
            f"refusals_429.{base}": float(refusals(side.answers)),
            f"requests.{base}": float(len(side.answers)),
            f"saturation_per_s.{base}": side.saturation,
            f"rate_per_s.{base}": side.rate,
        }
        if failed:
            result.wrong.append(f"{base}: {len(failed)} requests did not end in 200 with every token.")
        for answer in failed[:3]:
            print(f"  {answer.ask.model}: {answer.status} {answer.fault}", flush=True)
    return cold


def beside(arguments: argparse.Namespace) -> Path:
    """Return where states are: beside the results, on a disk; a temporary folder may be memory."""
    found: Path = arguments.out.resolve().parent
    found.mkdir(parents=True, exist_ok=True)
    return found


def of_stock(
    given: Params,
    base: str,
    client: Client,
    arguments: argparse.Namespace,
    cold: Sequence[int],
    result: Result,
) -> None:
    """Run the same storms on vLLM's own loader, with as many slots as they need."""
    from engine.base.resident import ensure_base

    shape, most = _served.SHAPES[base], max(cold)
    info = ensure_base(given.base.model_copy(update={"name": base}), given.paths)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=beside(arguments)) as root,
        ExitStack() as stack,
    ):
        maker = _made.PeftMaker(Path(root), info, shape.rank, shape.torch_dtype)
        server = stack.enter_context(
            _served.stock(info, shape, Path(root), WARM + most + SPARE, WARM + 2 * most + 32)
        )
        there = Server(server.url, server.key)
        side = Side("stock", "stock", client, there, maker.make, random.Random(1), most, LENGTHS[base])
        side.find_rate()
        for n in cold:
            arms = side.alternate(n, min(STOCK_REPEATS, arguments.repeats), 0, lambda: None)
            # Whether stock's answers are right is its own matter; they must show that it applied adapters.
            name = f"{base}, stock, {n} cold"
            result.wrong += _answers.faults(name, arms.checks, TOLERANCE_NATS[base], 0.0)
            result.add(arms, base, n, "_stock")
            told(result, base, n, "_stock")
        result.figures |= {
            f"errors_stock.{base}": float(errors(side.answers)),
            f"saturation_per_s_stock.{base}": side.saturation,
            f"rate_per_s_stock.{base}": side.rate,
        }


def told(result: Result, base: str, cold: int, tail: str = "") -> None:
    names = (
        "ratio", "over_calm", "control_over_calm", "ready_over_warm", "counted", "own_share",
        "unlike_base_share",
    )  # fmt: skip
    found = {name: result.figures.get(f"{name}{tail}.{base}.n{cold}") for name in names}
    text = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if value is not None)
    print(f"  {base}{tail} n{cold}: {text}", flush=True)


def run(given: Params, bases: Sequence[str], arguments: argparse.Namespace) -> None:
    result = Result()
    with Client() as client:
        for base in bases:
            cold = ours(given, base, client, arguments, result)
            if base == "many-moe" and arguments.density:
                found = _density.measure(given, client, beside(arguments))
                result.figures |= {"density": max(found.values()), **found}
            if arguments.stock:
                of_stock(given, base, client, arguments, list(cold), result)
        result.figures["client_cpu_share"] = client.cpu_share
    print(*result.wrong, sep="\n")
    figures = sums(result.figures) | result.figures
    record.report("storm", figures, result.bounds, result.spreads, not result.wrong, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", choices=list(_served.SHAPES), action="append")
    parser.add_argument("--cold", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--repeats", type=int, default=10, help="alternations, at least")
    parser.add_argument("--least", type=int, help="warm requests to count in each arm")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--density", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--drop-cache", action="store_true", help="cold adapters come from the disk")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="whose built bases are used")
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    arguments = parser.parse_args()
    run(load_params(arguments.params), arguments.base or BASES, arguments)


if __name__ == "__main__":
    main()
