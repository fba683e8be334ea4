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
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import _density
import _made
import _record as record
import _served
from _storm_figures import Alternation, Arms, errors, faults, refusals, window
from _traffic import Answer, Ask, Client, Server, arrivals, prompt

from engine.config import Params, load_params

SHARE, WARM = 0.4, 16
# Tokens of a prompt and of its answer; a step of many-moe reads a gigabyte of experts.
LENGTHS = {"tiny-dense": (24, 8), "many-moe": (8, 4)}
# Requests before the burst, so that it meets traffic; they are not counted.
LEAD_S = 0.5
# Closed-loop requests that find what the engine can do.
UNDER_WAY, PROBED = 64, 384
LEAST, LIMIT_S = 500, 600.0
# For so many times the longest storm so far warm traffic goes on.
MARGIN = 1.3
STOCK_REPEATS, CHECKED = 3, 8
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
# In float32 a dense base gives the same tokens in any batch; a mixture of experts in bfloat16 rounds anew.
LEAST_AGREED = {"tiny-dense": 1.0, "many-moe": 0.0}


@dataclass
class Side:
    """A server under storms: ours or vLLM's own; `make` gives names of adapters that nobody asked for."""

    name: str
    client: Client
    server: Server
    make: Callable[[int], list[str]]
    chance: random.Random
    residents: int
    lengths: tuple[int, int]
    answers: list[Answer] = field(default_factory=list)
    rate: float = 0.0
    saturation: float = 0.0
    seconds_a_cold: float = 0.0

    def __post_init__(self) -> None:
        names = self.make(WARM + self.residents)
        self.warm, self.resident = names[:WARM], names[WARM:]

    def ask(self, asks: Sequence[Ask], under_way: int = 0) -> list[Answer]:
        found = self.client.ask(self.server, asks, under_way)
        self.answers += found
        return found

    def find_rate(self) -> None:
        """Find how many warm requests a second the server can do, and take a share of it."""
        self.settle(self.warm)
        asks = [self.warm_ask(0.0) for _ in range(PROBED)]
        for _ in range(2):
            began = time.monotonic()
            self.ask(asks, UNDER_WAY)
            self.saturation = PROBED / (time.monotonic() - began)
        self.rate = SHARE * self.saturation
        print(f"  {self.name}: saturation {self.saturation:.1f} a second, rate {self.rate:.1f}", flush=True)

    def settle(self, names: Sequence[str]) -> None:
        """Ask each name for one token, so that it is resident and its slot is not the next to be taken."""
        self.ask([Ask(0.0, name, self.prompt(), 1) for name in names], UNDER_WAY // 2)

    def prompt(self) -> tuple[int, ...]:
        return prompt(self.chance, self.lengths[0])

    def warm_ask(self, at: float) -> Ask:
        return Ask(at, self.chance.choice(self.warm), self.prompt(), self.lengths[1])

    def alternate(self, cold: int, repeats: int, least: int, before_storm: Callable[[], None]) -> Arms:
        """Alternate until there are `repeats`, with `least` warm requests counted in each arm."""
        arms, resident = Arms(), self.resident[:cold]
        if not self.seconds_a_cold:
            # The first one warms up, and says how long a storm takes.
            warm_up = self.alternation(cold, resident, 2.0, 0, 0.0, before_storm)
            self.seconds_a_cold = self.window_s(warm_up) / cold
        seconds = self.seconds_a_cold * cold
        began = time.monotonic()
        calm_s = max(2.0, least / repeats / self.rate)
        while len(arms.alternations) < repeats or arms.counted < least:
            if time.monotonic() - began > LIMIT_S:
                break
            number = len(arms.alternations)
            one = self.alternation(cold, resident, MARGIN * seconds, number, calm_s, before_storm)
            arms.alternations.append(one)
            seconds = max(seconds, self.window_s(one))
        return arms

    @staticmethod
    def window_s(one: Alternation) -> float:
        return max(end - start for start, end in (window(one.storm), window(one.control)))

    def alternation(
        self, cold: int, resident: list[str], seconds: float, number: int, calm_s: float,
        before_storm: Callable[[], None],
    ) -> Alternation:  # fmt: skip
        """Run a storm and its control, in the other order every other time, and then neither."""
        times = arrivals(self.chance, self.rate, LEAD_S + seconds)
        traffic = [self.warm_ask(at) for at in times]
        prompts = [self.prompt() for _ in range(cold)]
        names = {"storm": self.make(cold), "control": resident}
        before_storm()
        found: dict[str, list[Answer]] = {}
        for arm in in_turn(names, number):
            self.settle([*resident, *self.warm] if arm == "control" else self.warm)
            burst = [
                Ask(LEAD_S, name, each, self.lengths[1], burst=True)
                for name, each in zip(names[arm], prompts, strict=True)
            ]
            found[arm] = self.ask([*traffic, *burst])
        calm = []
        if calm_s:
            times = arrivals(self.chance, self.rate, LEAD_S + calm_s)
            calm = [a for a in self.ask([self.warm_ask(at) for at in times]) if a.ask.at >= LEAD_S]
        return Alternation(found["storm"], found["control"], calm)

    def agreed(self, arms: Arms) -> tuple[float, int]:
        """Return the share of some cold answers that come again when asked alone, and how many differ.

        The second is how many answers there are to one prompt, each from another adapter: one would mean that
        no adapter was applied.
        """
        cold = [answer for answer in arms.alternations[-1].storm if answer.ask.burst][:CHECKED]
        alone = self.ask([Ask(0.0, a.ask.model, a.ask.prompt, self.lengths[1]) for a in cold], under_way=1)
        same = sum(one.ids == again.ids for one, again in zip(cold, alone, strict=True))
        one_prompt = [Ask(0.0, a.ask.model, cold[0].ask.prompt, self.lengths[1]) for a in cold]
        return same / len(cold), len({answer.ids for answer in self.ask(one_prompt)})


def in_turn(arms: Iterable[str], number: int) -> list[str]:
    """Return the order of an alternation: whoever goes second finds another state, so each one does."""
    return list(arms)[:: -1 if number % 2 else 1]


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
