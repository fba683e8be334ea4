"""The fewest engines with which users have their first token in time, and what fewer would mean for them."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.planning.fleet.assumptions import EngineModel, FleetOutcome, Scenario

MOST = 4096
# Where so many times what throughput needs is not enough, more engines do not help.
ENOUGH = 32
Simulated = Callable[[int], FleetOutcome]


@dataclass(frozen=True)
class Sized:
    """The fewest engines that hold, and what was simulated."""

    engines: int
    outcomes: dict[int, FleetOutcome]

    @property
    def found(self) -> FleetOutcome:
        """Return what users see of the fewest engines that hold."""
        return self.outcomes[self.engines]

    @property
    def fewer(self) -> FleetOutcome | None:
        """Return what users see of one engine less; None where none would be left."""
        return self.outcomes.get(self.engines - 1)


def capacity(model: EngineModel) -> float:
    """Return the most requests a second that one engine answers with warm adapters."""
    tokens = model.prompt + model.answer - 1
    begun = min(model.rows / model.answer, model.budget / tokens)
    steps = begun / (model.step_s + model.token_s * begun * tokens + model.adapter_s)
    return min(steps, 1 / model.request_s) if model.request_s else steps


def alone_s(model: EngineModel) -> float:
    """Return the seconds to the first token of a warm request at an idle engine."""
    steps = -(-model.prompt // model.budget)
    return model.request_s + steps * (model.step_s + model.adapter_s) + model.token_s * model.prompt


def fewest(scenario: Scenario, model: EngineModel, within_s: float, simulated: Simulated) -> Sized:
    """Find the fewest engines with which p95 to the first token is at most `within_s`.

    Raises `ConfigError` where no number of engines holds.
    """
    if alone_s(model) > within_s:
        raise ConfigError(
            f"No number of engines has first tokens within {within_s:g} s: a request alone on an idle engine "
            f"waits {alone_s(model):.2f} s. Raise --within-s, or use faster engines."
        )
    outcomes: dict[int, FleetOutcome] = {}

    def holds(count: int) -> bool:
        if count not in outcomes:
            outcomes[count] = simulated(count)
        return outcomes[count].keeps_up and outcomes[count].first_token_p95_s <= within_s

    away = scenario.kill + scenario.wave
    least = max(away + 1, scenario.kill + int(scenario.rate / capacity(model)))
    few, many = least - 1, least
    while not holds(many):
        if many >= min(MOST, ENOUGH * least):
            last = outcomes[many]
            raise ConfigError(
                f"Not even {many} engines do: 95% of first tokens take {last.first_token_p95_s:.2f} s, "
                f"and {last.cold:.0%} of requests wait for a load. Give engines more host memory "
                "(engine.host_bytes), or raise --within-s."
            )
        few, many = many, min(MOST, many + max(1, many - least + 1))
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if holds(middle) else (middle, many)
    if many - 1 > away:
        holds(many - 1)
    return Sized(many, outcomes)
