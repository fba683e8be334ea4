"""Cold adapters that arrive while others are served: what warm requests feel of it.

    graftwork bench storm [--base tiny-dense | --base many-moe | --base smollm2-135m] [--cold 32 256]
                          [--repeats N] [--stock] [--density] [--drop-cache] [--long]

Warm requests arrive all the time (Poisson, at 40% of what the engine can do, which is found first). In a
storm N requests arrive at once for N adapters that nobody ever asked for; in its control the same N requests
go to resident adapters, which have a slot each. Storm and control alternate with the same arrivals and
prompts, and traffic without either goes between them. `ratio` is warm TTFT p95 in storms over controls, of
the same warm requests: those that arrive between the first cold arrival and the last cold first token.
Each alternation gives one `ratio`; they go on until its median is decided. `over_calm` and
`control_over_calm` are those of storms and of controls over traffic without a burst, of all alternations. An
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import _answers
import _density
import _made
import _record as record
import _served
from _run import Run, options, start
from _storm_figures import Arms, errors, faults, refusals
from _storm_side import WARM, Side
from _traffic import Client, Server

from engine.base.families import BaseShapes
from engine.planning.tiers import cpu_slots, host_tier_adapters, host_tier_bytes
from engine.settings.params import Params, load_params
from engine.settings.services import EngineConfig

BASES = ("tiny-dense", "many-moe")
# Tokens of a prompt and of its answer.
LENGTHS = {"tiny-dense": (24, 8), "many-moe": (8, 4), "smollm2-135m": (24, 8)}
STOCK_REPEATS = 3
# Of written adapters that stay on the disk; older ones are asked for no more.
KEPT_BYTES = 12 << 30
LIMITS = {32: 1.15, 256: 1.3}
READY = record.at_most(1.5)
# Slots and places of the host tier that a storm leaves free.
SPARE = 8
BOUNDS = {
    "ratio": record.at_most(),
    "over_calm": record.at_most(),
    "control_over_calm": record.at_most(),
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

    figures: record.Figures = field(default_factory=record.Figures)
    wrong: list[str] = field(default_factory=list)
    bounds: dict[str, record.Bound] = field(default_factory=lambda: dict(BOUNDS))

    def add(self, arms: Arms, base: str, cold: int, tail: str = "") -> None:
        """Take an arm's figures, by names with base and N; `tail` says on which server."""
        if not arms.alternations:
            return
        values, spreads = arms.figures()
        values |= _answers.figures_of(arms.checks, TOLERANCE_NATS[base])
        end = f"{tail}.{base}.n{cold}"
        self.figures.values |= {f"{name}{end}": value for name, value in values.items()}
        self.figures.spreads |= {f"{name}{end}": text for name, text in spreads.items()}
        self.figures.add_pairs(arms.pairs(), end)


def sizes(asked: Sequence[int], most: int) -> dict[int, float]:
    """Return the N of the storms, each at most `most`, with the limit on its ratio: infinite without one."""
    return {min(n, most): LIMITS.get(n, math.inf) for n in sorted(asked)}


def most_cold(engine: EngineConfig, shapes: BaseShapes, adapter_bytes: int) -> int:
    """Return how many adapters can arrive at once while as many are resident, and the warm ones too."""
    held = min(host_tier_bytes(engine) // adapter_bytes, host_tier_adapters(engine))
    return min(cpu_slots(engine, shapes) - WARM - SPARE, (held - WARM - SPARE) // 2)


def ours(
    run: Run, given: Params, base: str, client: Client, arguments: argparse.Namespace, result: Result,
    share: float,
) -> dict[int, float]:  # fmt: skip
    """Run the storms on our engine; return their sizes with the limits."""
    shape, figures = _served.SHAPES[base], result.figures
    with ExitStack() as stack:
        engine = stack.enter_context(_served.live(given, base, beside(arguments)))
        maker = _made.Maker(engine.params, engine.base, "storm", shape.rank, shape.torch_dtype)
        stack.callback(maker.close)
        config, shapes = engine.params.engine, BaseShapes.read(engine.base.path)
        cold = sizes(arguments.cold, most_cold(config, shapes, maker.bytes))
        result.bounds |= {f"ratio.{base}.n{n}": record.at_most(limit) for n, limit in cold.items()}
        result.bounds |= {f"ready_over_warm.{base}.n{n}": READY for n in cold if n == 32}
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

        for number, (n, limit) in enumerate(cold.items()):
            if run.is_interrupted:
                break
            evicted = _served.evictions(engine.server)
            read_s.clear()
            bounds = {"ratio": record.at_most(limit)} | ({"ready_over_warm": READY} if n == 32 else {})
            part = share / (len(cold) - number)
            arms = side.alternate(run, n, bounds, before_storm, part, arguments.repeats)
            name = f"{base}, {n} cold"
            if arms.alternations:
                result.wrong += faults(name, arms)
                result.wrong += _answers.faults(name, arms.checks, TOLERANCE_NATS[base], LEAST_OWN[base])
            result.add(arms, base, n)
            figures.values[f"evictions.{base}.n{n}"] = float(_served.evictions(engine.server) - evicted)
            if read_s:
                figures.add({"disk_read_s": list(read_s)}, f".{base}.n{n}")
            told(result, base, n)
        failed = [one for one in side.answers if not one.is_right]
        figures.values |= {
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
    run: Run, given: Params, base: str, client: Client, arguments: argparse.Namespace, cold: Sequence[int],
    result: Result,
) -> None:  # fmt: skip
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
            arms = side.alternate(run, n, {}, lambda: None, 1.0, arguments.repeats or STOCK_REPEATS)
            # Whether stock's answers are right is its own matter; they must show that it applied adapters.
            name = f"{base}, stock, {n} cold"
            if arms.alternations:
                result.wrong += _answers.faults(name, arms.checks, TOLERANCE_NATS[base], 0.0)
            result.add(arms, base, n, "_stock")
            told(result, base, n, "_stock")
        result.figures.values |= {
            f"errors_stock.{base}": float(errors(side.answers)),
            f"saturation_per_s_stock.{base}": side.saturation,
            f"rate_per_s_stock.{base}": side.rate,
        }


def told(result: Result, base: str, cold: int, tail: str = "") -> None:
    names = (
        "ratio", "over_calm", "control_over_calm", "ready_over_warm", "counted", "own_share",
        "unlike_base_share",
    )  # fmt: skip
    found = {name: result.figures.values.get(f"{name}{tail}.{base}.n{cold}") for name in names}
    text = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if value is not None)
    print(f"  {base}{tail} n{cold}: {text}", flush=True)


def measure(run: Run, given: Params, bases: Sequence[str], arguments: argparse.Namespace) -> Result:
    result = Result()
    values = result.figures.values
    with run.preparing(), Client() as client:
        for number, base in enumerate(bases):
            if run.is_interrupted:
                break
            share = 1 / (len(bases) - number)
            cold = ours(run, given, base, client, arguments, result, share)
            if base == "many-moe" and arguments.density and not run.is_interrupted:
                found = _density.measure(given, client, beside(arguments))
                values |= {"density": max(found.values()), **found}
            if arguments.stock and not run.is_interrupted:
                of_stock(run, given, base, client, arguments, list(cold), result)
        values["client_cpu_share"] = client.cpu_share
    # Of all of our engines.
    values["errors"] = sum(value for name, value in values.items() if name.startswith("errors."))
    return result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=list(_served.SHAPES), action="append")
    parser.add_argument("--cold", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, help="alternations, at most")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, help="default with --long")
    parser.add_argument("--density", action=argparse.BooleanOptionalAction, help="default with --long")
    parser.add_argument("--drop-cache", action="store_true", help="cold adapters come from the disk")
    arguments = parser.parse_args()
    run = Run("storm", arguments.long)
    arguments.cold = arguments.cold or ([32, 256] if run.is_long else [32])
    for name in ("stock", "density"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, run.is_long)
    bases = arguments.base or (BASES if run.is_long else BASES[:1])
    result = measure(run, load_params(arguments.params), bases, arguments)
    print(*result.wrong, sep="\n")
    record.report(run, result.figures, result.bounds, not result.wrong, arguments.out)


if __name__ == "__main__":
    start(main)
