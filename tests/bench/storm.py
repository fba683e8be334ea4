"""Cold adapters that arrive while others are served: what warm requests feel of it.

    graftwork bench storm [--base tiny-dense --base many-moe] [--cold 32 256] [--repeats 10] [--no-stock]
                          [--no-density] [--drop-cache]

Warm requests arrive all the time (Poisson, at 40% of what the engine can do, which is found first). In a
storm N requests arrive at once for N adapters that nobody ever asked for; in its control the same N requests
go to resident adapters, which have a slot each. Storm and control alternate with the same arrivals and
prompts, and traffic without either goes between them. `ratio` is warm TTFT p95 in storms over controls, of
the same warm requests: those that arrive between the first cold arrival and the last cold first token.
`ratio_paced` is the same storm, paced by the gateway's admission, over traffic without a storm. An open-loop
client in a process of its own measures, by streams; it honours `Retry-After`, and counts each 429. vLLM's own
loader runs the same storms in the same run, at 40% of its own saturation.
"""

import argparse
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import _density
import _made
import _record as record
import _served
from _storm_figures import Arms, errors, faults, refusals
from _storm_side import WARM, Side
from _traffic import Client, Server

from engine.config import Params, load_params

# Tokens of a prompt and of its answer; a step of many-moe reads a gigabyte of experts.
LENGTHS = {"tiny-dense": (24, 8), "many-moe": (8, 4)}
LEAST, STOCK_REPEATS = 500, 3
# Of written adapters that stay on the disk; older ones are asked for no more.
KEPT_BYTES = 12 << 30
TARGETS = {
    "ratio.n32": "<= 1.15",
    "ratio.n256": "<= 1.3",
    "ratio_paced.n32": "<= 1.4",
    "ratio_paced.n256": "<= 1.4",
    "ready_32_over_warm": "<= 1.5",
    "errors": "== 0",
    "density": "<= 1.1",
}
# In float32 a dense base gives the same tokens in any batch; bfloat16 experts round anew in each.
LEAST_AGREED = {"tiny-dense": 1.0, "many-moe": 0.5}


@dataclass
class Result:
    """What a run found."""

    figures: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, arms: Arms, cold: int, tail: str = "") -> None:
        values, spreads = arms.figures()
        names = {name: f"{name}{tail}.n{cold}" for name in values}
        if not tail:
            names["ready_over_warm"] = f"ready_{cold}_over_warm"
        self.figures |= {names[name]: value for name, value in values.items()}
        self.spreads |= {names[name]: text for name, text in spreads.items()}


def ours(given: Params, base: str, client: Client, arguments: argparse.Namespace, result: Result) -> None:
    """Run the storms on our engine."""
    shape, most = _served.SHAPES[base], max(arguments.cold)
    with ExitStack() as stack:
        # What was asked for in earlier alternations leaves while new ones arrive.
        held = WARM + 2 * most + 32
        each = adapter_bytes(given, base)
        engine = stack.enter_context(
            _served.live(given, base, slots=slots(most), host_bytes=max(1 << 20, held * each))
        )
        maker = _made.Maker(engine.params, engine.base, "storm", shape.rank, shape.torch_dtype)
        stack.callback(maker.close)
        side = Side("ours", client, engine.server, maker.make, random.Random(1), most, LENGTHS[base])
        kept = len(maker.segments)
        side.find_rate()

        def before_storm() -> None:
            fresh = maker.segments[kept:]
            if arguments.drop_cache:
                _made.drop_cache(fresh)
            while sum(path.stat().st_size for path in fresh) > KEPT_BYTES:
                maker.remove([fresh.pop(0)])

        for cold in arguments.cold:
            arms = side.alternate(cold, arguments.repeats, arguments.least, before_storm)
            result.add(arms, cold)
            result.wrong += faults(f"{base}, {cold} cold", arms, arguments.repeats, arguments.least)
            check(result, base, cold, *side.agreed(arms))
            told(result, cold)
        result.figures |= {
            "errors": float(errors(side.answers)), "refusals_429": float(refusals(side.answers)),
            "requests": float(len(side.answers)), "saturation_per_s": side.saturation,
            "rate_per_s": side.rate,
        }  # fmt: skip
        for answer in [one for one in side.answers if not one.is_right][:3]:
            print(f"  {answer.ask.model}: {answer.status} {answer.fault}", flush=True)


def adapter_bytes(given: Params, base: str) -> int:
    """Return the packed bytes of one adapter as this benchmark makes them."""
    from engine.adapters import packed
    from engine.adapters.families import BaseShapes
    from engine.base import base_config

    shape, shapes = (
        _served.SHAPES[base],
        BaseShapes.of(base_config(given.base.model_copy(update={"name": base}), given.paths)),
    )
    tensors = _made.template(shapes, shape.rank, shape.torch_dtype)
    return packed.pack(tensors, shape.torch_dtype, shapes.fused).layout.nbytes


def slots(most: int) -> int:
    """Return how many slots let the warm adapters and a whole burst stay beside each other."""
    return WARM + most + 8


def check(result: Result, base: str, cold: int, agreed: float, answers: int) -> None:
    """Note whether answers in a storm are the adapters' own."""
    result.figures[f"agreed_alone.n{cold}"] = agreed
    if agreed < LEAST_AGREED[base]:
        result.wrong.append(f"{base}, {cold} cold: {agreed:.0%} of answers come again when asked alone.")
    if answers < 2:
        result.wrong.append(f"{base}, {cold} cold: every adapter gave the same answer.")


def beside(given: Params, base: str, client: Client, arguments: argparse.Namespace, result: Result) -> None:
    """Run the same storms on vLLM's own loader."""
    from engine.base import ensure_base

    shape, most = _served.SHAPES[base], max(arguments.cold)
    info = ensure_base(given.base.model_copy(update={"name": base}), given.paths)
    with tempfile.TemporaryDirectory(prefix="graftwork-storm-") as root, ExitStack() as stack:
        maker = _made.PeftMaker(Path(root), info, shape.rank, shape.torch_dtype)
        server = stack.enter_context(
            _served.stock(info, shape, Path(root), slots(most), WARM + 2 * most + 32)
        )
        side = Side(
            "stock", client, Server(server.url, server.key), maker.make, random.Random(1), most, LENGTHS[base]
        )
        side.find_rate()
        for cold in arguments.cold:
            arms = side.alternate(cold, min(STOCK_REPEATS, arguments.repeats), 0, lambda: None)
            result.add(arms, cold, "_stock")
            _, answers = side.agreed(arms)
            if answers < 2:
                result.wrong.append(f"{base}, stock: every adapter gave the same answer.")
            told(result, cold, "_stock")
        result.figures |= {
            "errors_stock": float(errors(side.answers)), "saturation_per_s_stock": side.saturation,
            "rate_per_s_stock": side.rate,
        }  # fmt: skip


def told(result: Result, cold: int, tail: str = "") -> None:
    found = result.figures
    ready = f"ready_over_warm{tail}.n{cold}" if tail else f"ready_{cold}_over_warm"
    print(
        f"  {tail or ' ours'} n{cold}: ratio {found[f'ratio{tail}.n{cold}']:.3g}, "
        f"paced {found[f'ratio_paced{tail}.n{cold}']:.3g}, ready {found[ready]:.3g}, "
        f"counted {found[f'counted{tail}.n{cold}']:.0f}",
        flush=True,
    )


def run(given: Params, base: str, arguments: argparse.Namespace) -> None:
    result = Result()
    with Client() as client:
        ours(given, base, client, arguments, result)
        if base == "many-moe" and arguments.density:
            found = _density.measure(given, client)
            result.figures |= {"density": max(found.values()), **found}
        if arguments.stock:
            beside(given, base, client, arguments, result)
        result.figures["client_cpu_share"] = client.cpu_share
    print(*result.wrong, sep="\n")
    record.report(f"storm-{base}", result.figures, TARGETS, result.spreads, not result.wrong, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", choices=list(_served.SHAPES), action="append")
    parser.add_argument("--cold", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--repeats", type=int, default=10, help="alternations, at least")
    parser.add_argument("--least", type=int, default=LEAST, help="warm requests to count in each arm")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--density", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--drop-cache", action="store_true", help="cold adapters come from the disk")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="whose built bases are used")
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    arguments = parser.parse_args()
    for base in arguments.base or list(_served.SHAPES):
        run(load_params(arguments.params), base, arguments)


if __name__ == "__main__":
    main()
