"""Whether one tenant's burst starves another: B's time to the first token beside A's share and ten of it.

    graftwork bench fairness [--base tiny-dense] [--requests 100] [--long]

Two tenants' clients together saturate the engine: each has as many as the engine has sequences. Then A has
ten times as many. The two loads alternate until the ratio of B's p95 is decided. `--long` asks both bases,
with 500 requests of B under each load.
"""

import asyncio
import statistics
from functools import partial

import _record as record
from _run import Run, options, start
from _served import live
from gateway import Side, body, session

from engine.catalog.opening import whole_catalog
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


def compared(a: Side, b: Side, requests: int, number: int) -> dict[str, float]:
    """Return the ratios of one pair of loads, in the other order every other time."""
    seen = {
        times: asyncio.run(share(a, b, SEQUENCES * times, requests))
        for times in record.in_turn((1, TIMES), number)
    }
    (p95, speed), (burst_p95, burst_speed) = seen[1], seen[TIMES]
    return {"b_ttft_p95_ratio": burst_p95 / p95, "b_throughput_ratio": burst_speed / speed}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", action="append", choices=BASES)
    parser.add_argument("--requests", type=int, help="of B under each load")
    args = parser.parse_args()
    run = Run("fairness", args.long)
    params, requests = load_params(args.params), args.requests or (500 if run.is_long else 100)
    params.paths.root.mkdir(parents=True, exist_ok=True)
    figures = record.Figures()
    bases = args.base or (BASES if run.is_long else BASES[:1])
    for left, base in zip(range(len(bases), 0, -1), bases, strict=True):
        if run.is_interrupted:
            break
        with run.preparing(), live(params, base, params.paths.root, max_num_seqs=SEQUENCES) as ours:
            catalog = whole_catalog(ours.params.paths.catalog_url)
            keys = [catalog.keys.create(tenant, "user", [f"{tenant}-*"]) for tenant in ("a", "b")]
            catalog.close()
            a, b = (Side(ours.server.url, [key], ours.roots[0], ours.base.name) for key in keys)
            asyncio.run(share(a, b, SEQUENCES, SEQUENCES))
            take = partial(compared, a, b, requests)
            found = run.pairs(f"{base}, pair of loads", take, BOUNDS, share=1 / left)
            figures.add_pairs(found, f".{base}")
    record.report(run, figures, BOUNDS, bool(figures.values), args.out)


if __name__ == "__main__":
    start(main)
