"""Whether one tenant's burst starves another: B's time to the first token beside A's share and ten of it.

    graftwork bench fairness [--base tiny-dense] [--requests 500] [--alternations 10]

Two tenants' clients together saturate the engine: each has as many as the engine has sequences. Then A has
ten times as many. The two loads alternate; the figure is the ratio of B's p95.
"""

import argparse
import asyncio
import statistics
from pathlib import Path

import _record as record
from _served import live
from gateway import Side, body, session

from engine.catalog.catalog import Catalog
from engine.settings.params import load_params

BOUNDS = {"b_ttft_p95_ratio": record.at_most(1.2), "b_throughput_ratio": record.at_least()}
TIMES, SEQUENCES, TOKENS = 10, 16, 32
BASES = ("tiny-dense", "many-moe")


async def share(a: Side, b: Side, clients_of_a: int, requests: int) -> tuple[float, float]:
    """Return B's p95 to the first token, and its requests a second, beside so many clients of A."""
    times: list[float] = []
    ended = asyncio.Event()

    async def of_a() -> None:
        while not ended.is_set():
            await a.ask(asking, body(a.model, TOKENS, True))

    async def of_b() -> None:
        while len(times) < requests:
            times.append(await b.ask(asking, body(b.model, TOKENS, True)))

    async with session(a.url) as asking:
        burst = [asyncio.create_task(of_a()) for _ in range(clients_of_a)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(of_b() for _ in range(SEQUENCES)))
        took = loop.time() - began
        ended.set()
        await asyncio.gather(*burst)
    return statistics.quantiles(times, n=20)[-1], len(times) / took


async def alternated(a: Side, b: Side, requests: int, alternations: int) -> dict[str, list[float]]:
    await share(a, b, SEQUENCES, SEQUENCES)
    found: dict[str, list[float]] = {"b_ttft_p95_ratio": [], "b_throughput_ratio": []}
    for number in range(alternations):
        seen = {}
        for load in record.in_turn(("1", "10"), number):
            seen[load] = await share(a, b, SEQUENCES * (TIMES if load == "10" else 1), requests)
        found["b_ttft_p95_ratio"].append(seen["10"][0] / seen["1"][0])
        found["b_throughput_ratio"].append(seen["10"][1] / seen["1"][1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    parser.add_argument("--base", action="append", choices=BASES)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--alternations", type=int, default=10)
    args = parser.parse_args()
    params = load_params(args.params)
    params.paths.root.mkdir(parents=True, exist_ok=True)
    figures = record.Figures()
    for base in args.base or BASES:
        with live(params, base, params.paths.root, max_num_seqs=SEQUENCES) as ours:
            catalog = Catalog(ours.params.paths.catalog_url)
            keys = [catalog.keys.create(tenant, "user", [f"{tenant}-*"]) for tenant in ("a", "b")]
            catalog.close()
            a, b = (Side(ours.server.url, [key], ours.roots[0], ours.base.name) for key in keys)
            found = asyncio.run(alternated(a, b, args.requests, args.alternations))
        figures.add(found, f".{base}")
    record.report("fairness", figures.values, BOUNDS, figures.spreads, True, args.out)


if __name__ == "__main__":
    main()
