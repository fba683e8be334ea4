"""What the simulation assumes of engine, store and traffic, and what it returns.

The defaults of `EngineModel` are fitted to four figures of docs/benchmarks/storm.md, of commit 2614dce:
`many-moe` on two EPYC cores. `tests/helpers/simulated_storm.py` has them, and others that check the model.
"""

from dataclasses import dataclass

# More engines than these are not simulated: their requests take too long to place.
MOST = 4096


@dataclass(frozen=True)
class EngineModel:
    """One engine: a step of its batch takes `step_s`, and more for each token, adapter and load.

    `rows` and `budget` are the most sequences and tokens of a step (vLLM's `max_num_seqs` and
    `max_num_batched_tokens`). `load_s` is what a cold load takes of the cores that compute steps. Before
    its first step a request takes `request_s` of the gateway, which has one at a time. Steps alike in all of
    that differ by a lognormal factor of mean 1, whose logarithm has the standard deviation `step_spread`.
    """

    step_s: float = 0.46
    token_s: float = 0.0003
    adapter_s: float = 0.00275
    load_s: float = 0.0154
    request_s: float = 0.0
    step_spread: float = 0.0
    rows: int = 128
    budget: int = 2048
    prompt: int = 8
    answer: int = 4
    restart_s: float = 40.0


@dataclass(frozen=True)
class StoreModel:
    """The store: a fetch takes `fetch_s` in the median (lognormal, `spread` in log), and may fail.

    A fetch fails with the chance `faults` after `fault_s`, and is tried again. An engine has `at_once`
    fetches under way. No latency of S3 was measured in this project: the defaults are assumptions.
    """

    fetch_s: float = 0.06
    spread: float = 0.6
    faults: float = 0.001
    fault_s: float = 1.0
    at_once: int = 16


@dataclass(frozen=True)
class Scenario:
    """Traffic and what happens to the engines; times in seconds from the start.

    `kill` ends that many engines for good after a third of the time; `wave` drains and restarts one engine
    after another from then on. `host` is how many adapters an engine's host tier holds.
    """

    policies: int = 1_000_000
    engines: int = 64
    rate: float = 512.0
    zipf: float = 0.9
    host: int = 4096
    seconds: float = 120.0
    affinity: bool = True
    kill: int = 0
    wave: bool = False
    seed: int = 0


@dataclass(frozen=True)
class FleetOutcome:
    """What users saw, of the requests that came after the first tenth of the time, or since engines ended.

    `cold` is the share of requests that waited for a load; `busy` the share of time in which engines
    computed; `rows` the share of a batch's rows in use. `left` counts the requests without a first token at
    the end.
    """

    engines: int
    affinity: bool
    rate: float
    requests: int
    cold: float
    first_token_p50_s: float
    first_token_p95_s: float
    answer_p50_s: float
    answer_p95_s: float
    warm_p95_s: float
    busy: float
    rows: float
    again: int
    restarted: int
    left: int

    @property
    def hours_a_million(self) -> float:
        """Return the replica-hours of a million requests at this traffic."""
        return self.engines / self.rate * 1e6 / 3600

    @property
    def keeps_up(self) -> bool:
        """Whether the engines answered nearly all requests: the rest would be waiting for ever longer."""
        return self.left <= 0.05 * self.requests + 50
