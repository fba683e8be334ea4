"""The fewest engines with which users have their first token in time."""

import math
from collections.abc import Callable

from engine.errors import ConfigError
from engine.planning.fleet.assumptions import MOST, EngineModel, FleetOutcome, Scenario

# Where so many times what throughput needs is not enough, more engines do not help.
ENOUGH = 32
Outcomes = dict[int, FleetOutcome]


def capacity(model: EngineModel, adapters: float = 1) -> float:
    """Return the most requests a second that one engine answers of so many warm adapters."""
    tokens = model.prompt + model.answer - 1
    begun = min(model.rows / model.answer, model.budget / tokens)
    different = min(adapters, begun * model.answer)
    steps = begun / (model.step_s + model.token_s * begun * tokens + model.adapter_s * different)
    return min(steps, 1 / model.request_s) if model.request_s else steps


def fewest(
    scenario: Scenario, model: EngineModel, within_s: float, simulated: Callable[[int], FleetOutcome]
) -> tuple[int, Outcomes]:
    """Find the fewest engines with which p95 to the first token is at most `within_s`, and all outcomes.

    That of one engine less is among them, where one is left then. Raises `ConfigError` where no number of at
    most `MOST` holds.
    """
    alone_s = model.request_s + model.step_s + model.adapter_s + model.token_s * model.prompt
    if alone_s > within_s:
        raise ConfigError(
            f"No number of engines has first tokens within {within_s:g} s: a request alone on an idle engine "
            f"waits {alone_s:.2f} s. Raise --within-s, or use faster engines."
        )
    outcomes: Outcomes = {}

    def holds(count: int) -> bool:
        one = outcomes[count] = outcomes.get(count) or simulated(count)
        return one.keeps_up and one.first_token_p95_s <= within_s

    down = scenario.kill + scenario.wave
    least = max(down + 1, scenario.kill + int(scenario.rate / capacity(model)))
    if least > MOST:
        raise ConfigError(
            f"This traffic needs {least} engines or more, and at most {MOST} are simulated. Lower --rate, "
            "--prompt or --answer, or use faster engines."
        )
    few, many = least - 1, least
    while not holds(many):
        if many >= min(ENOUGH * least, MOST):
            last = outcomes[many]
            if math.isnan(last.first_token_p95_s):
                raise ConfigError(
                    f"No first token came in the {scenario.seconds:g} s that were simulated. Raise --seconds "
                    "or --rate."
                )
            raise ConfigError(
                f"Not even {many} engines do: 95% of first tokens take {last.first_token_p95_s:.2f} s, and "
                f"{last.cold:.0%} of requests wait for a load. Give engines more host memory "
                "(engine.host_bytes), or raise --within-s."
            )
        few, many = many, min(2 * many - least + 1, MOST)
    # What throughput needs is an estimate, and a short time may be survived with less.
    if down < few < least and holds(few):
        few, many = down, few
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if holds(middle) else (middle, many)
    return many, outcomes
