"""Measure the times of a running engine, for `graftwork plan engines --calibrate`."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.catalog.opening import open_catalog
from engine.clients.engine import EngineClient
from engine.errors import ConfigError, ServiceError
from engine.planning.fleet.assumptions import EngineModel
from engine.planning.fleet.fit import COLD_LOAD, LOADS, LoadSize, MeasuredLoad, answers_of, fitted
from engine.planning.memory import BATCHED_TOKENS
from engine.settings.params import Params
from tasks.fleet_plan import refuse_unless_writable
from tasks.outcome import local_key

# Routes that are looked at for policies whose adapters are not loaded.
LOOKED_AT = 1000
TIMEOUT_S = 600.0
# What every vocabulary has, without special ones.
TOKENS = range(5, 300)


def measure(params: Params, prompt: int, answer: int, file: Path) -> dict[str, Any]:
    """Ask the settings' engine, and write the times that its answers show to a JSON file.

    Loads are measured where enough policies' adapters are not on the engine. Raises `ConfigError` without
    policies, for answers of one token, and for a file that cannot be written; `ServiceError` where the engine
    does not answer token by token.
    """
    refuse_unless_writable("--measure", file)
    if answer < 2:
        raise ConfigError("--measure takes the time between tokens. Give an --answer of 2 or more.")
    with open_catalog(params.paths) as catalog:
        names = [route.policy for route in catalog.routes.page(limit=LOOKED_AT) if route.champion]
    if not names:
        raise ConfigError("--measure asks policies with a champion, and the catalog has none. Release one.")
    with EngineClient(params.url("engine"), local_key(params), "probe", TIMEOUT_S) as client:
        loaded = {name.partition("@")[0] for name in client.residency()["adapters"]}
        absent = [name for name in names if name not in loaded]

        def load(size: LoadSize, some: list[str]) -> MeasuredLoad:
            size = size._replace(policies=min(size.policies, len(some)))

            def timed(number: int, tokens: int) -> tuple[float, float]:
                # Random tokens, which no cache of prefixes knows.
                ids = random.choices(TOKENS, k=prompt)
                return client.timed(some[number % size.policies], ids, tokens)

            with ThreadPoolExecutor(size.under_way) as pool:
                times = list(pool.map(timed, range(size.requests), answers_of(size, answer)))
            waits, rests = zip(*times[size.under_way :], strict=True)
            if not any(rests):
                raise ServiceError("The engine sends each answer in one piece. Give a longer --answer.")
            return MeasuredLoad.of(size, waits, rests)

        cold = [load(COLD_LOAD, absent)] if len(absent) >= COLD_LOAD.policies else []
        load(LOADS[-1], names)
        loads = [load(size, names) for size in LOADS]
    rows = params.engine.max_num_seqs
    shape = EngineModel(rows=rows, budget=max(BATCHED_TOKENS, rows), prompt=prompt, answer=answer)
    found = fitted([*loads, *cold], shape)
    file.write_text(json.dumps(found, indent=2) + "\n")
    return found
