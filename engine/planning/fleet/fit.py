"""The times of one engine, fitted so that the simulation answers loads of several sizes as it did."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from engine.planning.fleet.assumptions import EngineModel, StoreModel
from engine.planning.fleet.engine_process import SimulatedEngine, SimulatedRequest
from engine.planning.fleet.simulation import simpy_module

# In what steps logarithms of times are tried, and how far from where they start.
STEP, WIDTH = 0.05, np.log(1e4)


class LoadSize(NamedTuple):
    """A closed loop: requests under way, different policies that they ask by turns, requests in all."""

    under_way: int
    policies: int
    requests: int


LOADS = (LoadSize(1, 1, 16), LoadSize(8, 1, 32), LoadSize(8, 8, 32), LoadSize(24, 8, 72))
# What is tried for the spread of steps, each with so many random numbers.
SPREADS, SEEDS = np.arange(0, 0.8, 0.02).tolist(), 8
# Of policies whose adapters are not loaded; an engine loads for two at once, whoever asks.
COLD_LOAD = LoadSize(2, 24, 24)


def answers_of(size: LoadSize, answer: int) -> list[int]:
    """Return the tokens of each answer of a closed loop; those that begin it are not measured, and differ.

    Otherwise all that are under way would begin in one step and end in another, again and again. Users'
    requests are spread over the steps: a prompt meets answers of others. Cold requests are all alike, since
    what two loads take of a step shows better than what one takes.
    """
    if size == COLD_LOAD:
        return [answer] * size.requests
    first = [1 + number * answer // size.under_way for number in range(size.under_way)]
    return first + [answer] * (size.requests - size.under_way)


@dataclass(frozen=True)
class MeasuredLoad:
    """A loop's mean seconds to the first token and from there to the last; `tail`: p95 over the first."""

    size: LoadSize
    wait_s: float
    rest_s: float
    tail: float

    @classmethod
    def of(cls, size: LoadSize, waits: Sequence[float], rests: Sequence[float]) -> "MeasuredLoad":
        """Return what these requests show: the seconds to the first token of each, and those after it."""
        wait_s = mean(waits)
        return cls(size, wait_s, mean(rests), float(np.percentile(waits, 95)) / wait_s)


def closed_loop(
    env: Any, take: Callable[[SimulatedRequest], None], under_way: int, requests: Iterable[tuple[int, int]]
) -> list[SimulatedRequest]:
    """Make requests of these policies and tokens, `under_way` at once; return them when all are done."""
    left, asked = iter(requests), list[SimulatedRequest]()

    def begin() -> None:
        if (one := next(left, None)) is not None:
            policy, answer = one
            asked.append(request := SimulatedRequest(policy, env.now, answer, then=begin))
            take(request)

    for _ in range(under_way):
        begin()
    env.run()
    return asked


def simulated(size: LoadSize, model: EngineModel, store: StoreModel, seed: int = 0) -> MeasuredLoad:
    """Return what one simulated engine makes of a load."""
    env = simpy_module().Environment()
    engine = SimulatedEngine(env, model, store, size.requests, np.random.default_rng(seed), lambda _: None)
    if size != COLD_LOAD:
        engine.tier.update(dict.fromkeys(range(size.policies)))
    requests = [
        (number % size.policies, answer) for number, answer in enumerate(answers_of(size, model.answer))
    ]
    some = closed_loop(env, engine.take, size.under_way, requests)[size.under_way :]
    waits, rests = [one.first - one.at for one in some], [one.done - one.first for one in some]
    return MeasuredLoad.of(size, waits, rests)


def fitted(loads: Sequence[MeasuredLoad], shape: EngineModel) -> dict[str, Any]:
    """Return fields of `EngineModel` and `StoreModel` that bring the simulation nearest to these loads.

    Least squares of the logarithms of each load's two times, then of its tail, which gives `step_spread`
    alone. Without a cold load, `load_s` and `fetch_s` are left out. `shape` has what is not fitted, and comes
    back with them: rows, budget, prompt and answer.
    """
    alone = min(loads, key=lambda one: one.size.under_way)
    step_s, shares = alone.rest_s / (shape.answer - 1), (0.1, 0.6)
    names = ["step_s", "token_s", "adapter_s", "request_s"]
    # A request alone waits for gateway and prompt: both a little and most of it are where a search starts.
    starts = [
        [step_s / 2, alone.wait_s * (1 - share) / shape.prompt, step_s / 10, alone.wait_s * share]
        for share in shares
    ]
    if any(one.size == COLD_LOAD for one in loads):
        names, starts = [*names, "load_s", "fetch_s"], [[*one, step_s, alone.wait_s] for one in starts]
    model, store = replace(shape, load_s=0.0, step_spread=0.0), StoreModel(faults=0.0, spread=0.0)

    def times(logs: NDArray[np.float64]) -> dict[str, Any]:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def models(found: dict[str, Any]) -> tuple[EngineModel, StoreModel]:
        engine = {name: value for name, value in found.items() if name != "fetch_s"}
        return replace(model, **engine), replace(store, fetch_s=found.get("fetch_s", 0.0))

    def off(logs: NDArray[np.float64]) -> list[float]:
        pairs = [(one, simulated(one.size, *models(times(logs)))) for one in loads]
        shares = [(got.wait_s / one.wait_s, got.rest_s / one.rest_s) for one, got in pairs]
        return np.log(shares).ravel().tolist()

    tried = [
        least_squares(off, log, bounds=(log - WIDTH, log + WIDTH), diff_step=STEP, max_nfev=30)
        for log in map(np.log, starts)
    ]
    found = times(min(tried, key=lambda one: one.cost).x)
    found["step_spread"] = _spread(loads, *models(found))
    given = {name: getattr(shape, name) for name in ("rows", "budget", "prompt", "answer")}
    return found | given


def _spread(loads: Sequence[MeasuredLoad], model: EngineModel, store: StoreModel) -> float:
    """Return the spread of steps with which simulated tails are nearest to those of these loads."""

    def off(spread: float) -> float:
        varied = replace(model, step_spread=spread)
        tails = [[simulated(one.size, varied, store, seed).tail for seed in range(SEEDS)] for one in loads]
        return sum(mean(np.log(each) - np.log(one.tail)) ** 2 for each, one in zip(tails, loads, strict=True))

    return min(SPREADS, key=off)
