"""One server under storms: what it is asked, and when."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import _record as record
from _answers import Check, check_of
from _run import LEAST_LONG, Run
from _storm_figures import STARVED, Alternation, Arms
from _traffic import Answer, Ask, Client, Server, arrivals, prompt

SHARE, WARM = 0.4, 16
# Requests before the burst, so that it meets traffic; they are not counted.
LEAD_S = 0.5
# Closed-loop requests that find what the engine can do.
UNDER_WAY, PROBED = 64, 384
# Of traffic without a burst, after each storm.
CALM_S = 2.0
# For so many times the median storm so far warm traffic goes on: a storm that is longer starves an adapter.
MARGIN = STARVED
# Cold answers that are compared, of each of the first alternations.
CHECKED, CHECKED_STORMS = 8, 10


@dataclass
class Side:
    """A server under storms, ours or vLLM's own, which calls its base `base`.

    `make` gives names of adapters that nobody asked for; `residents` are for the largest control.
    """

    name: str
    base: str
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

    def alternate(
        self, run: Run, cold: int, bounds: record.Bounds, before_storm: Callable[[], None], share: float,
        most: int | None = None,
    ) -> Arms:  # fmt: skip
        """Alternate until the bounds are decided, `most` times at most; each counts, whatever comes out."""
        arms, resident = Arms(), self.resident[:cold]
        if not self.seconds_a_cold:
            # The first one warms up, and the second says how long a storm takes.
            for _ in range(2):
                warm_up = self.alternation(cold, resident, 2.0, 0, 0.0, before_storm)
            self.seconds_a_cold = warm_up.seconds / cold
        lasted = [self.seconds_a_cold * cold]

        def take(number: int) -> None:
            seconds = MARGIN * record.median(lasted)
            one = self.alternation(cold, resident, seconds, number, CALM_S, before_storm)
            checks = self.checks(one) if number < CHECKED_STORMS else []
            arms.alternations.append(one)
            lasted.append(one.seconds)
            arms.checks += checks

        def is_enough(_: object) -> bool:
            return len(arms.alternations) >= (LEAST_LONG if run.is_long else 1) and arms.is_decided(bounds)

        what = f"{self.name}, {cold} cold, alternation"
        run.repeats(what, take, share=share, most=most, is_enough=is_enough)
        return arms

    def alternation(
        self, cold: int, resident: list[str], seconds: float, number: int, calm_s: float,
        before_storm: Callable[[], None],
    ) -> Alternation:  # fmt: skip
        """Run a storm and its control, in the other order every other time, and then neither."""
        times = arrivals(self.chance, self.rate, LEAD_S + seconds)
        traffic = [self.warm_ask(at) for at in times]
        prompts = [self.prompt() for _ in range(cold)]
        names = {"storm": self.make(cold)} | ({"control": resident} if resident else {})
        compared = set(self.chance.sample(range(cold), min(CHECKED, cold)))
        before_storm()
        found: dict[str, list[Answer]] = {}
        for arm in record.in_turn(names, number):
            self.settle([*resident, *self.warm] if arm == "control" else self.warm)
            burst = [
                Ask(LEAD_S, name, each, self.lengths[1], burst=True, logprobs=i in compared)
                for i, (name, each) in enumerate(zip(names[arm], prompts, strict=True))
            ]
            found[arm] = self.ask([*traffic, *burst])
        calm = []
        if calm_s:
            times = arrivals(self.chance, self.rate, LEAD_S + calm_s)
            calm = [a for a in self.ask([self.warm_ask(at) for at in times]) if a.ask.at >= LEAD_S]
        return Alternation(found["storm"], found.get("control", []), calm, seconds)

    def checks(self, one: Alternation) -> list[Check]:
        """Ask the sampled cold adapters one after another, and then the base and a warm adapter the same."""
        cold = [answer for answer in one.storm if answer.ask.logprobs]
        # Only what is to be equal must be alone in its steps.
        alone, base, other = (
            self.ask([replace(a.ask, at=0.0, model=model or a.ask.model) for a in cold], under_way)
            for model, under_way in (("", 1), (self.base, CHECKED), (self.warm[0], CHECKED))
        )
        return [check_of(*answers) for answers in zip(cold, alone, base, other, strict=True)]
