"""`bench storm` on one simulated engine: the figures that the model is fitted to, and those that check it.

The measured ones are of docs/benchmarks/storm.md: `many-moe` on two EPYC cores, quiet, commit 2614dce.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.planning.fleet.assumptions import EngineModel, StoreModel
from engine.planning.fleet.engine_process import SimulatedEngine, SimulatedRequest
from engine.planning.fleet.simulation import simpy_module

# As tests/bench/_storm_side.py has them: warm adapters, requests under way at saturation, and their number.
WARM, UNDER_WAY, PROBED, LEAD_S, MARGIN = 16, 64, 384, 0.5, 3.0
RATE, REPEATS, CALM_S = 12.1, 30, 120.0
# Name, measured, whether the model is fitted to it.
MEASURED = {
    "saturation, requests a second": (30.2, True),
    "warm p95 without a storm, s": (1.07, True),
    "256 resident: to all first tokens, s": (8.1, True),
    "256 cold: to all first tokens, s": (12.1, True),
    "32 resident: to all first tokens, s": (1.02, False),
    "32 cold: to all first tokens, s": (1.27, False),
    "32 resident: warm p95, s": (1.27, False),
    "32 cold: warm p95, s": (1.39, False),
    "256 resident: warm p95, s": (8.3, False),
    "256 cold: warm p95, s": (11.0, False),
}
# How far a figure that the model is not fitted to may be off.
TOLERANCE = 0.2
# The benchmark's adapters lie on the local disk.
LOCAL = StoreModel(fetch_s=0.0, faults=0.0)


@dataclass(frozen=True)
class Compared:
    """A figure as it was measured and as the simulation gives it."""

    name: str
    measured: float
    simulated: float
    is_fitted: bool

    @property
    def off(self) -> float:
        """Return by which share the simulation is above what was measured."""
        return self.simulated / self.measured - 1

    @property
    def holds(self) -> bool:
        """Return whether it is within the tolerance."""
        return abs(self.off) <= TOLERANCE


def compare(model: EngineModel) -> list[Compared]:
    """Return every figure of `MEASURED` beside what the model gives."""
    simulated = {
        "saturation, requests a second": saturation(model),
        "warm p95 without a storm, s": calm_p95(model),
    }
    for count in (32, 256):
        for name, is_cold in (("resident", False), ("cold", True)):
            p95, ready_s = storm(model, count, is_cold)
            simulated[f"{count} {name}: warm p95, s"] = p95
            simulated[f"{count} {name}: to all first tokens, s"] = ready_s
    return [Compared(name, value, simulated[name], fitted) for name, (value, fitted) in MEASURED.items()]


def _engine(model: EngineModel, chance: np.random.Generator) -> tuple[Any, SimulatedEngine]:
    env = simpy_module().Environment()
    engine = SimulatedEngine(env, model, LOCAL, host=4096, chance=chance, lost=lambda request: None)
    # The warm adapters, and those of a control.
    engine.tier.update(dict.fromkeys(range(WARM + 256)))
    return env, engine


def saturation(model: EngineModel) -> float:
    """Return the requests a second of `PROBED` requests in a closed loop of `UNDER_WAY`."""
    chance = np.random.default_rng(0)
    env, engine = _engine(model, chance)
    asked: list[SimulatedRequest] = []

    def client() -> Generator[Any, Any, None]:
        while len(asked) < PROBED:
            asked.append(request := SimulatedRequest(int(chance.integers(WARM)), env.now))
            engine.take(request)
            while request.done < 0:
                yield env.timeout(0.005)

    ends = [env.process(client()) for _ in range(UNDER_WAY)]
    env.run(until=env.all_of(ends))
    return PROBED / float(env.now)


def calm_p95(model: EngineModel) -> float:
    """Return the warm p95 time to first token without a burst."""
    chance = np.random.default_rng(0)
    env, engine = _engine(model, chance)
    warm = _arrive(env, engine, chance, CALM_S)
    env.run(until=CALM_S + 30)
    return float(np.percentile([one.first - one.at for one in warm if one.at >= LEAD_S], 95))


def storm(model: EngineModel, count: int, is_cold: bool) -> tuple[float, float]:
    """Return the warm p95 during bursts of `count`, and the median seconds to all their first tokens."""
    waits: list[float] = []
    seconds: list[float] = []
    for seed in range(REPEATS):
        chance = np.random.default_rng(seed)
        env, engine = _engine(model, chance)
        lasts_s = 3 * 12.0 if count > 32 else 3 * 1.5
        warm = _arrive(env, engine, chance, LEAD_S + lasts_s)
        first = WARM + (256 if is_cold else 0)
        burst = [SimulatedRequest(first + number, LEAD_S) for number in range(count)]
        env.process(_at(env, engine, burst))
        env.run(until=LEAD_S + lasts_s + 60)
        end = max(one.first for one in burst)
        seconds.append(end - LEAD_S)
        waits += [one.first - one.at for one in warm if LEAD_S <= one.at <= end]
    return float(np.percentile(waits, 95)), float(np.median(seconds))


def _at(env: Any, engine: SimulatedEngine, burst: list[SimulatedRequest]) -> Generator[Any, Any, None]:
    yield env.timeout(LEAD_S)
    for request in burst:
        engine.take(request)


def _arrive(
    env: Any, engine: SimulatedEngine, chance: np.random.Generator, seconds: float
) -> list[SimulatedRequest]:
    """Send warm requests as a Poisson process; return them, to be read after the run."""
    times = np.cumsum(chance.exponential(1 / RATE, int(RATE * seconds * 1.5) + 20))
    requests = [SimulatedRequest(int(chance.integers(WARM)), float(at)) for at in times[times < seconds]]

    def send() -> Generator[Any, Any, None]:
        for request in requests:
            yield env.timeout(request.at - env.now)
            engine.take(request)

    env.process(send())
    return requests
