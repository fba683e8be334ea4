"""Many engines under Zipf traffic, as a discrete-event simulation with simpy.

The host tiers start in the stationary state of LRU under independent requests: a policy of rate r was last
asked for an exponential time of mean 1 / r ago, and an engine holds those asked for last. So no warm-up has
to be simulated.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.planning.fleet.assumptions import EngineModel, FleetOutcome, Scenario, StoreModel
from engine.planning.fleet.engine_process import SimulatedEngine, SimulatedRequest
from engine.planning.fleet.placement import Anywhere, Placement, Ring

# Of the time; requests that come before are not counted: those before the lead, or before engines end.
LEAD, KILLED_AT = 0.1, 1 / 3
# How often a draining engine is looked at.
POLL_S = 0.1


def simpy_module() -> Any:
    """Return simpy; `ConfigError` where it is not installed."""
    try:
        import simpy
    except ImportError:
        raise ConfigError(
            "`graftwork plan engines` needs simpy. Install it with `pip install simpy matplotlib`."
        ) from None
    return simpy


def simulate(
    scenario: Scenario, model: EngineModel, store: StoreModel, placement: Placement | None = None
) -> FleetOutcome:
    """Run a scenario, with another placement where one is given; the same seed gives the same outcome."""
    return _Simulation(scenario, model, store, placement).run()


def popularity(policies: int, zipf: float) -> NDArray[np.float64]:
    """Return each policy's share of the requests: Zipf's law, the first is the most popular."""
    weights = np.arange(1, policies + 1, dtype=np.float64) ** -zipf
    return weights / weights.sum()


class _Simulation:
    def __init__(
        self, scenario: Scenario, model: EngineModel, store: StoreModel, placement: Placement | None
    ):
        self.scenario, self.model, self.chance = scenario, model, np.random.default_rng(scenario.seed)
        self.env = simpy_module().Environment()
        count = scenario.engines
        own = Ring(scenario.policies, count) if scenario.affinity else Anywhere(self.chance)
        self.placement = placement or own
        self.engines = [
            SimulatedEngine(self.env, model, store, scenario.host, self.chance, self._again)
            for _ in range(count)
        ]
        self.is_up = [True] * count
        self.shares = popularity(scenario.policies, scenario.zipf)
        self.requests: list[SimulatedRequest] = []
        self.again = self.restarted = 0

    def run(self) -> FleetOutcome:
        scenario = self.scenario
        self._fill()
        self.env.process(self._arrive())
        if scenario.kill:
            self.env.process(self._kill())
        if scenario.wave:
            self.env.process(self._wave())
        self.env.run(until=scenario.seconds)
        return self._outcome()

    def _fill(self) -> None:
        """Put into each host tier what it holds in the long run, the policy asked for last at the end."""
        first, host = self.placement.first, self.scenario.host
        # In multiples of the mean time between two requests; infinite means never.
        ages = self.chance.standard_exponential(len(self.shares)) / self.shares
        for number, engine in enumerate(self.engines):
            if first is None:
                ages = self.chance.standard_exponential(len(self.shares)) / self.shares
                mine = np.argpartition(ages, min(host, len(ages) - 1))[:host]
            else:
                mine = np.flatnonzero(first == number)
            newest_last = mine[np.argsort(ages[mine])][:host][::-1]
            engine.tier.update(dict.fromkeys(newest_last.tolist()))

    def _arrive(self) -> Generator[Any, Any, None]:
        """Send Poisson traffic to the engines."""
        scenario = self.scenario
        count = self.chance.poisson(scenario.rate * scenario.seconds)
        times = np.sort(self.chance.random(count)) * scenario.seconds
        asked = np.searchsorted(np.cumsum(self.shares), self.chance.random(count))
        policies = np.minimum(asked, scenario.policies - 1).tolist()
        timeout, now = self.env.timeout, 0.0
        for at, policy in zip(times.tolist(), policies, strict=True):
            if at > now:
                yield timeout(at - now)
                now = at
            request = SimulatedRequest(policy, at)
            self.requests.append(request)
            self._send(request)

    def _send(self, request: SimulatedRequest) -> None:
        load = [engine.load for engine in self.engines]
        self.engines[self.placement.choose(request.policy, load, self.is_up)].take(request)

    def _again(self, request: SimulatedRequest) -> None:
        """Send a killed engine's request to another, as HAProxy does while no byte was answered."""
        self.again += 1
        request.first = -1.0
        self._send(request)

    def _kill(self) -> Generator[Any, Any, None]:
        yield self.env.timeout(KILLED_AT * self.scenario.seconds)
        for number in range(self.scenario.kill):
            self.is_up[number] = False
            self.engines[number].kill()

    def _wave(self) -> Generator[Any, Any, None]:
        """Drain and restart one engine after another, those that live."""
        yield self.env.timeout(KILLED_AT * self.scenario.seconds)
        for number, engine in enumerate(self.engines):
            if engine.is_dead:
                continue
            self.is_up[number] = False
            while engine.load:
                yield self.env.timeout(POLL_S)
            engine.tier.clear()
            yield self.env.timeout(self.model.restart_s)
            self.is_up[number] = True
            self.restarted += 1

    def _outcome(self) -> FleetOutcome:
        scenario = self.scenario
        lead = KILLED_AT if scenario.kill or scenario.wave else LEAD
        counted = [one for one in self.requests if one.at >= lead * scenario.seconds]
        waited = np.array([one.first - one.at for one in counted if one.first >= 0])
        warm = np.array([one.first - one.at for one in counted if one.first >= 0 and not one.cold])
        answers = np.array([one.done - one.at for one in counted if one.done >= 0])
        time_s = scenario.seconds * scenario.engines
        return FleetOutcome(
            engines=scenario.engines,
            affinity=scenario.affinity,
            rate=scenario.rate,
            requests=len(counted),
            cold=float(np.mean([one.cold for one in counted])) if counted else 0.0,
            first_token_p50_s=_percentile(waited, 50),
            first_token_p95_s=_percentile(waited, 95),
            answer_p50_s=_percentile(answers, 50),
            answer_p95_s=_percentile(answers, 95),
            warm_p95_s=_percentile(warm, 95),
            busy=sum(engine.busy_s for engine in self.engines) / time_s,
            rows=sum(engine.row_s for engine in self.engines) / time_s,
            again=self.again,
            restarted=self.restarted,
            left=len(counted) - len(waited),
        )


def _percentile(values: NDArray[np.float64], level: float) -> float:
    return float(np.percentile(values, level)) if len(values) else float("nan")
