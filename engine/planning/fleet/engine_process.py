"""One simulated engine: continuous batching in steps, a host tier with LRU eviction, loads from the store."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.planning.fleet.assumptions import EngineModel, StoreModel


@dataclass(slots=True)
class SimulatedRequest:
    """One request; times in seconds of the simulation, negative until they are known.

    `answer`: the tokens of its answer, 0 for the model's. `then` is called when it is done.
    """

    policy: int
    at: float
    answer: int = 0
    cold: bool = False
    first: float = -1.0
    done: float = -1.0
    then: Callable[[], None] | None = None


class SimulatedEngine:
    """An engine in a simpy environment; `lost` takes the requests of one that is killed."""

    def __init__(
        self,
        env: Any,
        model: EngineModel,
        store: StoreModel,
        host: int,
        chance: np.random.Generator,
        lost: Callable[[SimulatedRequest], None],
    ):
        self.env, self.model, self.store, self.host, self._lost = env, model, store, host, lost
        self.tier: OrderedDict[int, None] = OrderedDict()
        self.load, self.busy_s, self.row_s = 0, 0.0, 0.0
        self.is_dead = False
        self._chance = chance
        self._gateway: deque[SimulatedRequest] = deque()
        self._free_at = 0.0
        self._waiting: deque[SimulatedRequest] = deque()
        self._loading: dict[int, list[SimulatedRequest]] = {}
        self._loads: deque[int] = deque()
        self._fetches = self._loaded = 0
        # By the number of the step at whose end they are done.
        self._ends: dict[int, list[SimulatedRequest]] = {}
        # Tokens of the first waiting prompt that are computed already.
        self._running = self._computed = 0
        self._adapters: Counter[int] = Counter()
        self._idle: Any = None
        env.process(self._steps())

    def take(self, request: SimulatedRequest) -> None:
        """Take a request: its turn in the gateway, its adapter's load, the next step."""
        self.load += 1
        if not self.model.request_s:
            return self._admit(request)
        self._gateway.append(request)
        self._free_at = max(self._free_at, self.env.now) + self.model.request_s
        self.env.timeout(self._free_at - self.env.now).callbacks.append(self._pass)

    def _pass(self, _: Any) -> None:
        # A killed engine's gateway is empty.
        if self._gateway:
            self._admit(self._gateway.popleft())

    def _admit(self, request: SimulatedRequest) -> None:
        if request.policy in self.tier:
            self.tier.move_to_end(request.policy)
            self._waiting.append(request)
            self._wake()
            return
        request.cold = True
        if request.policy in self._loading:
            self._loading[request.policy].append(request)
            return
        self._loading[request.policy] = [request]
        self._loads.append(request.policy)
        self._fetch_next()

    def kill(self) -> None:
        """End at once: all requests under way are lost."""
        self.is_dead = True
        under_way = [*self._gateway, *self._waiting, *(one for some in self._ends.values() for one in some)]
        under_way += [one for some in self._loading.values() for one in some]
        self.load = 0
        self._gateway.clear()
        for request in under_way:
            self._lost(request)

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None

    def _fetch_next(self) -> None:
        while self._loads and self._fetches < self.store.at_once:
            self._fetches += 1
            self.env.process(self._fetch(self._loads.popleft()))

    def _fetch(self, policy: int) -> Generator[Any, Any, None]:
        store, chance = self.store, self._chance
        while store.faults and chance.random() < store.faults:
            yield self.env.timeout(store.fault_s)
        if store.fetch_s:
            yield self.env.timeout(store.fetch_s * np.exp(store.spread * chance.standard_normal()))
        self._fetches -= 1
        self._fetch_next()
        self.tier[policy] = None
        if len(self.tier) > self.host:
            self.tier.popitem(last=False)
        self._loaded += 1
        self._waiting.extend(self._loading.pop(policy))
        self._wake()

    def _steps(self) -> Generator[Any, Any, None]:
        model, number = self.model, 0
        while True:
            if not (self._waiting or self._running):
                self._idle = self.env.event()
                yield self._idle
            if self.is_dead:
                return
            fresh, tokens = self._start(number)
            # Rows that were there before compute one token each.
            tokens += self._running - len(fresh)
            took = model.step_s + model.token_s * tokens + model.adapter_s * len(self._adapters)
            # The cores that compute steps also check and copy loaded adapters, at most a batch at a time.
            loads = min(self._loaded, model.rows)
            self._loaded -= loads
            took += model.load_s * loads
            if spread := model.step_spread:
                took *= self._chance.lognormal(-spread * spread / 2, spread)
            yield self.env.timeout(took)
            if self.is_dead:
                return
            number += 1
            self.busy_s += took
            self.row_s += took * self._running / model.rows
            for request in fresh:
                request.first = self.env.now
            self._finish(self._ends.pop(number, []))

    def _start(self, number: int) -> tuple[list[SimulatedRequest], int]:
        """Start waiting requests that fit into the next step; return them and their prompts' tokens.

        A prompt that does not fit is computed in parts; its request starts with the last one.
        """
        model, fresh, tokens = self.model, [], 0
        room = model.budget - self._running
        while self._waiting and self._running < model.rows and tokens < room:
            part = min(model.prompt - self._computed, room - tokens)
            tokens += part
            self._computed += part
            if self._computed < model.prompt:
                break
            self._computed = 0
            request = self._waiting.popleft()
            fresh.append(request)
            self._running += 1
            self._adapters[request.policy] += 1
            self._ends.setdefault(number + (request.answer or model.answer), []).append(request)
        return fresh, tokens

    def _finish(self, ended: list[SimulatedRequest]) -> None:
        self._running -= len(ended)
        self.load -= len(ended)
        for request in ended:
            request.done = self.env.now
            self._adapters[request.policy] -= 1
            if not self._adapters[request.policy]:
                del self._adapters[request.policy]
            if request.then:
                request.then()
