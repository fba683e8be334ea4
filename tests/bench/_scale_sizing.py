"""Two engines behind HAProxy beside a simulation that is fitted to one engine: how far the simulation is off.

Each engine has one core, which clients, HAProxy and gateways use too, and for which nobody waits in the
simulation. So the base is one whose steps cost much more than that. Each engine is measured by itself while
the other does the same, and the survivor of a kill once more. A machine's speed drifts within minutes: the
fit of each repeat is of loads before and after what it is compared with, requests a second in a closed loop,
p50 and p95 to the first token at 40% and 70% of that, and at 40% with one engine dead. What counts is the
median of the repeats' differences. The share of cold requests, where the host tiers hold few of the policies,
is measured once, after the last loads, and compared with the first fit.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import _record as record
import httpx
import numpy as np
import psutil
from _scale_cluster import START_S, Cluster, Host, cluster, wait_for
from _traffic import Answer, Ask, Client, Server, arrivals, prompt

from engine.planning.fleet.assumptions import EngineModel, Scenario, StoreModel
from engine.planning.fleet.engine_process import SimulatedEngine, SimulatedRequest
from engine.planning.fleet.fit import (
    COLD_LOAD,
    LOADS,
    LoadSize,
    MeasuredLoad,
    answers_of,
    closed_loop,
    fitted,
    simulated,
)
from engine.planning.fleet.placement import Ring
from engine.planning.fleet.simulation import popularity, simpy_module, simulate
from engine.settings.params import BaseConfig, Params
from tasks.fleet_plan import read_models

BASE, PROMPT, TOKENS = "smollm2-135m", 8, 8
# Half of the warm ones live on each engine, and one host tier holds all of them; of the others it holds few.
WARM, COLD, HOST, ZIPF = 16, 72, 18, 0.6
UNDER_WAY, SATURATED, SIMULATED = 48, 288, 2400
# Of a simulation only what comes once an engine has ended counts; its first seconds are not measured here.
SECONDS, SIMULATED_S = 40.0, 600.0
# Short requests of a closed loop show the share of cold ones; those before the lead fill the host tiers.
COLD_UNDER_WAY, COLD_LEAD, COLD_ASKED, COLD_PROMPT, COLD_TOKENS, PLACEMENTS = 8, 200, 600, 16, 2, 6
RATES = {"at40": 0.4, "at70": 0.7}
BOTH, DOWN = "both", "one_down"
# Asked without HAProxy. At 40% it shows whether one engine is simulated well, which is no part of `plan_off`.
DIRECT, BALANCED = "direct", "balanced"
# Each repeat's closed loops with HAProxy and without.
PAIRS = 2
Models = tuple[EngineModel, StoreModel]


def sizing(given: Params, repeats: int, folder: Path) -> dict[str, list[float]]:
    """Return the figures as measured and simulated, the largest difference, and what HAProxy costs.

    It starts a cluster of its own. The fits are written to `folder`, as `graftwork plan engines --calibrate`
    takes them.
    """
    given = given.model_copy(update={"base": BaseConfig(name=BASE)})
    names = [f"sized-{number}" for number in range(2 * WARM + COLD)]
    with cluster(given, folder) as site, Client() as one, Client() as two:
        revisions = [site.publish(name, 1)[0] for name in names]
        few_in_the_host_tier(site, revisions[0])
        return Sizing(site, (one, two), names, folder).measure(repeats)


def few_in_the_host_tier(cluster: Cluster, revision: str) -> None:
    """Start the engines again with a host tier of `HOST` adapters, and a core for each."""
    each = cluster.catalog.revisions.get(*revision.split("@")).length
    for host in cluster.engines:
        host.stop()
        engine = host.params.engine.model_copy(update={"host_bytes": HOST * each})
        host.params = host.params.model_copy(update={"engine": engine})
        host.start(wait=False)
    for host, core in zip(cluster.engines, sorted(os.sched_getaffinity(0)), strict=False):
        wait_for(host.is_healthy, host.name, START_S)
        wait_for(host.is_ready, f"{host.name} to be ready", START_S)
        assert host.process is not None
        root = psutil.Process(host.process.pid)
        for process in (root, *root.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})
    # HAProxy sends to an engine after its second good check.
    time.sleep(2)


class Sizing:
    """The measurements, of two clients of which each asks one engine or HAProxy."""

    def __init__(self, cluster: Cluster, clients: tuple[Client, Client], names: Sequence[str], folder: Path):
        self.cluster, self.clients, self.folder = cluster, clients, folder
        self.chance = random.Random(44)
        self.balanced = Server(cluster.url, cluster.key)
        self.warm = self._homes(names[: 2 * WARM])
        self.cold = list(names[2 * WARM :])
        self.loads: dict[str, list[list[MeasuredLoad]]] = {BOTH: [], DOWN: []}
        self.measured: dict[str, list[float]] = {}
        self.rates: list[float] = []
        self.saturations: dict[str, list[float]] = {BALANCED: [], DIRECT: []}

    def measure(self, repeats: int) -> dict[str, list[float]]:
        servers = [Server(host.url, self.cluster.key) for host in self.cluster.engines]
        for number in range(repeats):
            self._loads(servers, BOTH)
            self.rates.append(self._saturated(servers))
            self._add("requests_per_s", self.rates[-1])
            print(f"  {number + 1} of {repeats}: {self.rates[-1]:.1f} requests a second", flush=True)
            self._add_waits(DIRECT, self._arrive(RATES["at40"] * self.rates[-1], servers))
            for name, share in RATES.items():
                self._add_waits(name, self._arrive(share * self.rates[-1]))
        self._loads(servers, BOTH)
        self._add("cold_share", self._cold_share())
        self._one_down()
        return self._compared()

    def _add(self, name: str, value: float) -> None:
        self.measured.setdefault(name, []).append(value)

    def _add_waits(self, name: str, answers: Sequence[Answer]) -> None:
        # From when it was sent: a client that finds no core late is no fault of an engine.
        waits = [one.first - one.sent for one in answers]
        for level in (50, 95):
            self._add(f"first_token_p{level}_s.{name}", float(np.percentile(waits, level)))

    def _homes(self, names: Sequence[str]) -> list[str]:
        """Return warm policies: by turns one that HAProxy sends to the first engine, and to the second."""
        found: list[list[str]] = []
        for some in (names[:WARM], names[WARM:]):
            self._ask([self.balanced], [[self._one(name) for name in some]], 1)
            for host in self.cluster.engines:
                here = {name.partition("@")[0] for name in residency(host, self.cluster.key)["adapters"]}
                found.append([name for name in some if name in here])
        mine, others = found[0] + found[2], found[1] + found[3]
        if min(len(mine), len(others)) < WARM // 2:
            raise RuntimeError(f"HAProxy sends {len(mine)} and {len(others)} policies to the two engines.")
        pairs = zip(mine[: WARM // 2], others[: WARM // 2], strict=True)
        return [name for pair in pairs for name in pair]

    def _one(self, policy: str, at: float = 0.0, tokens: int = TOKENS) -> Ask:
        return Ask(at, policy, prompt(self.chance, PROMPT), tokens)

    def _closed_loop(self, size: LoadSize, names: Sequence[str]) -> list[Ask]:
        """Return a closed loop's requests, of these policies by turns."""
        tokens = answers_of(size, TOKENS)
        return [
            self._one(names[number % size.policies], tokens=answer) for number, answer in enumerate(tokens)
        ]

    def _ask(
        self, servers: Sequence[Server], plans: Sequence[Sequence[Ask]], under_way: int = 0
    ) -> list[list[Answer]]:
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda c, s, p: c.ask(s, p, under_way), self.clients, servers, plans))
        if wrong := [answer.fault for each in told for answer in each if not answer.is_right]:
            raise RuntimeError(f"{len(wrong)} requests failed: {wrong[0]}")
        return told

    def _loads(self, servers: Sequence[Server], name: str) -> None:
        """Take the loads of each of these engines by itself, all at the same time."""
        found = []
        # The least popular ones are cold even where cold requests were counted before. Their loads evict what
        # the others need, so all of that is asked for in between.
        for size in (COLD_LOAD, LoadSize(4, WARM, WARM), *LOADS):
            names = self.cold[::-1] if size == COLD_LOAD else self.warm
            plans = [self._closed_loop(size, names)] * len(servers)
            told = self._ask(servers, plans, size.under_way)
            answers = [one for each in told for one in each[size.under_way :]]
            waits = [one.first - one.sent for one in answers]
            found.append(MeasuredLoad.of(size, waits, [one.done - one.first for one in answers]))
        self.loads[name].append([found[0], *found[2:]])

    def _saturated(self, servers: Sequence[Server]) -> float:
        """Return the mean requests a second behind HAProxy, measured in turns with engines asked directly."""
        found: dict[str, list[float]] = {BALANCED: [], DIRECT: []}
        for number in range(PAIRS):
            for way in record.in_turn(found, number):
                found[way].append(self._saturation(servers if way == DIRECT else ()))
        for way, values in found.items():
            self.saturations[way] += values
        return statistics.mean(found[BALANCED])

    def _saturation(self, servers: Sequence[Server] = ()) -> float:
        """Return the requests a second in a closed loop, of both engines behind HAProxy or of these."""
        names = self._halves() if servers else [self.warm, self.warm[::-1]]
        sizes = [LoadSize(UNDER_WAY // 2, len(each), SATURATED // 2) for each in names]
        plans = [self._closed_loop(size, each) for size, each in zip(sizes, names, strict=True)]
        told = self._ask(servers or [self.balanced] * 2, plans, UNDER_WAY // 2)
        return between([one.done for each in told for one in each])

    def _halves(self) -> list[list[str]]:
        """Return the warm policies of each engine."""
        return [self.warm[::2], self.warm[1::2]]

    def _arrive(self, rate: float, servers: Sequence[Server] = ()) -> list[Answer]:
        """Ask warm policies through HAProxy, or half of them each of these engines, as Poisson processes."""
        plans = []
        for names in self._halves() if servers else [self.warm] * 2:
            times = arrivals(self.chance, rate / 2, SECONDS)
            plans.append([self._one(self.chance.choice(names), at) for at in times])
        return [one for each in self._ask(servers or [self.balanced] * 2, plans) for one in each]

    def _cold_share(self) -> float:
        """Return the share of requests that wait for a load, once both host tiers are full."""
        weights = popularity(COLD, ZIPF).tolist()
        for count in (COLD_LEAD, COLD_ASKED):
            names = self.chance.choices(self.cold, weights, k=count)
            plan = [Ask(0.0, name, prompt(self.chance, COLD_PROMPT), COLD_TOKENS) for name in names]
            before = self._cold()
            self._ask([self.balanced] * 2, [plan[::2], plan[1::2]], COLD_UNDER_WAY // 2)
        return (self._cold() - before) / COLD_ASKED

    def _cold(self) -> int:
        return sum(cold_at(host, self.cluster.key) for host in self.cluster.engines)

    def _one_down(self) -> None:
        survivor, dead = self.cluster.engines
        dead.kill()
        # HAProxy has noticed, and the survivor has the adapters.
        time.sleep(2)
        for rate in self.rates:
            self._loads([Server(survivor.url, self.cluster.key)], DOWN)
            self._add_waits(DOWN, self._arrive(RATES["at40"] * rate))
        self._loads([Server(survivor.url, self.cluster.key)], DOWN)
        dead.start(wait=False)

    def _compared(self) -> dict[str, list[float]]:
        expected: dict[str, list[float]] = {}
        for number, rate in enumerate(self.rates):
            both, down = (self._model(name, number) for name in (BOTH, DOWN))
            for name, value in simulated_figures(both, down, rate).items():
                expected.setdefault(name, []).append(value)
        figures, off = dict[str, list[float]](), list[float]()
        for name, values in self.measured.items():
            figures |= {name: values, f"{name}.simulated": expected[name]}
            each = [one / value - 1 for one, value in zip(expected[name], values, strict=False)]
            print(f"  {name}: simulated {', '.join(f'{one:+.0%}' for one in each)}", flush=True)
            if DIRECT not in name:
                off.append(abs(statistics.median(each)))
        pairs = zip(self.saturations[BALANCED], self.saturations[DIRECT], strict=True)
        shares = [balanced / direct for balanced, direct in pairs]
        print(f"  behind HAProxy over directly: {', '.join(f'{one:.3f}' for one in shares)}", flush=True)
        return figures | {"plan_off": [max(off)], "throughput_share": shares}

    def _model(self, name: str, number: int) -> Models:
        """Fit the loads around a repeat, and write the file that `plan engines --calibrate` takes."""
        loads = [*self.loads[name][number], *self.loads[name][number + 1]]
        file = self.folder / f"sizing-{name}.json"
        file.write_text(json.dumps(fitted(loads, EngineModel(prompt=PROMPT, answer=TOKENS)), indent=2) + "\n")
        models = read_models(file)
        rests = [simulated(one.size, *models).rest_s / one.rest_s - 1 for one in loads]
        waits = [simulated(one.size, *models).wait_s / one.wait_s - 1 for one in loads]
        print(f"  fit, {name}: off by {max(map(abs, waits + rests)):.0%} at most", flush=True)
        return models


def simulated_figures(both: Models, down: Models, rate: float) -> dict[str, float]:
    """Return what the simulation gives in place of each measured figure."""
    ring = Homes(WARM)
    found = {"requests_per_s": saturated(both, ring)}
    warm = Scenario(policies=WARM, engines=2, zipf=0.0, host=HOST, seconds=SIMULATED_S)
    cases = [(name, replace(warm, rate=share * rate), both) for name, share in RATES.items()]
    alone = replace(warm, policies=WARM // 2, engines=1, rate=RATES["at40"] * rate / 2)
    cases.append((DIRECT, alone, both))
    for name, scenario, models in (*cases, (DOWN, replace(warm, rate=RATES["at40"] * rate, kill=1), down)):
        outcome = simulate(scenario, *models, ring if scenario.engines == 2 else None)
        found[f"first_token_p50_s.{name}"] = outcome.first_token_p50_s
        found[f"first_token_p95_s.{name}"] = outcome.first_token_p95_s
    return found | {"cold_share": statistics.mean(cold_share(both, seed) for seed in range(PLACEMENTS))}


class Homes(Ring):
    """The warm policies as HAProxy places them: by turns on either engine."""

    def __init__(self, policies: int):
        super().__init__(policies, 2)
        self.first = np.arange(policies) % 2
        self._starts = np.array([self.owners.index(engine) for engine in self.first])


def two_engines(
    models: Models, ring: Ring, under_way: int, requests: Iterable[tuple[int, int]], warm: int = 0
) -> list[SimulatedRequest]:
    """Return the requests of a closed loop at two simulated engines, each with the first adapters loaded."""
    env, chance = simpy_module().Environment(), np.random.default_rng(0)
    engines = [SimulatedEngine(env, *models, HOST, chance, lambda _: None) for _ in range(2)]
    for engine in engines:
        engine.tier.update(dict.fromkeys(range(warm)))

    def take(request: SimulatedRequest) -> None:
        engines[ring.choose(request.policy, [one.load for one in engines], [True] * 2)].take(request)

    return closed_loop(env, take, under_way, requests)


def saturated(models: Models, ring: Ring) -> float:
    """Return the requests a second of two simulated engines with `UNDER_WAY` requests under way."""
    tokens = answers_of(LoadSize(UNDER_WAY, WARM, SIMULATED), TOKENS)
    requests = [(number % WARM, answer) for number, answer in enumerate(tokens)]
    return between([one.done for one in two_engines(models, ring, UNDER_WAY, requests, WARM)])


def cold_share(models: Models, seed: int) -> float:
    """Return the share of cold requests with one placement of the policies."""
    (model, store), chance = models, np.random.default_rng(seed)
    short = replace(model, prompt=COLD_PROMPT)
    places = chance.permutation(COLD)
    policies = places[chance.choice(COLD, COLD_LEAD + COLD_ASKED, p=popularity(COLD, ZIPF))].tolist()
    requests = [(policy, COLD_TOKENS) for policy in policies]
    asked = two_engines((short, store), Ring(COLD, 2), COLD_UNDER_WAY, requests)
    return statistics.mean(one.cold for one in asked[COLD_LEAD:])


def between(ends: Sequence[float]) -> float:
    """Return the requests a second by when they ended; the first and the last found engines less busy."""
    some = sorted(ends)[UNDER_WAY:-UNDER_WAY]
    return (len(some) - 1) / (some[-1] - some[0])


def residency(host: Host, key: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{host.url}/graftwork/residency", headers=headers, timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def cold_at(host: Host, key: str) -> int:
    """Return how many requests of an engine have waited for a load."""
    warm = ("host", "slot")
    moves = residency(host, key)["transitions"]
    return sum(one["count"] for one in moves if one["event"] == "ask" and one["before"] not in warm)
