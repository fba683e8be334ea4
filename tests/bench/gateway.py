"""What the gateway adds to vLLM's server: latency, CPU, throughput; what a refused key costs; revocation.

    graftwork bench gateway [--base tiny-dense] [--clients 64] [--tokens 64] [--keys 1000] [--long]

Two engines on one base: ours, and the same without the middleware; both are asked for the base. Half of the
answers are streamed. Keys have limits, and usage is recorded. The engines take turns, in the other order
every other time, until each figure is decided. `added_*_ms` are differences of a pair, `added_p50_ms` those
of single requests by one client. `loop_*_ms` is the CPU of the gateway's own code for a whole answer and for
a stream of 64 pieces, in a loop without a server.
"""

import asyncio
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path

import _record as record
import aiohttp
import orjson
import psutil
from _gateway_loop import measure
from _run import Run, options, start
from _served import SHAPES, START_S, Live, live

from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.settings.params import Paths, load_params
from tests.helpers.live import free_port, start_reaped, stop_reaped

BOUNDS = {
    "added_p50_ms": record.at_most(0.3),
    "added_cpu_ms": record.at_most(0.3),
    "throughput": record.at_least(0.97),
    "refused_over_bare": record.at_most(1.5),
    "ttft_p95_with_bad_keys": record.at_most(1.1),
    "revoked_s": record.at_most(1.0),
}
LIMITS = {"tokens_per_day": 1e12, "tokens_per_minute": 1e12, "requests_per_minute": 1e9, "concurrency": 1e6}
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
# Requests of one client in a pair, and of the refused ones.
ONE_CLIENT, REFUSALS, BAD_PER_S = 10, 1000, 500
# Requests of one measurement in a loop.
LOOPS = 500
HERE = Path(__file__).parent


def body(model: str, tokens: int, is_stream: bool) -> bytes:
    fields = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return orjson.dumps(fields | ({"stream": True} if is_stream else {}))


class Side:
    """One engine, and what its API server's process has computed."""

    def __init__(self, url: str, keys: Sequence[str], pid: int, model: str):
        self.url, self.model = url, model
        self.key_count, self._keys = len(keys), cycle(keys)
        # The API server is the process that listens; the engine core is its child.
        port = int(url.rpartition(":")[2])
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        (self.process,) = [one for one in processes if listens(one, port)]

    def cpu_s(self) -> float:
        return sum(self.process.cpu_times()[:2])

    async def load(self, clients: int, each: int, tokens: int) -> tuple[float, float]:
        """Return tokens a second and the API server's CPU seconds a request."""
        began, cpu = time.monotonic(), self.cpu_s()
        async with session(self.url) as asking:
            await asyncio.gather(*(self._client(asking, number, each, tokens) for number in range(clients)))
        count = clients * each
        return count * tokens / (time.monotonic() - began), (self.cpu_s() - cpu) / count

    async def _client(self, asking: aiohttp.ClientSession, number: int, each: int, tokens: int) -> None:
        for turn in range(each):
            await self.ask(asking, body(self.model, tokens, (number + turn) % 2 == 0))

    async def text(self, tokens: int) -> str:
        """Return a greedy completion."""
        async with session(self.url) as asking:
            data = body(self.model, tokens, False)
            async with asking.post("/v1/completions", data=data, headers=self._headers()) as response:
                return str((await response.json())["choices"][0]["text"])

    async def ask(self, asking: aiohttp.ClientSession, data: bytes) -> float:
        """Ask with the next key; return the seconds until the first byte. The whole answer is read."""
        headers = self._headers()
        began = time.perf_counter()
        async with asking.post("/v1/completions", data=data, headers=headers) as response:
            await response.content.readany()
            first = time.perf_counter() - began
            rest = await response.read()
            assert response.status == 200, rest[:300]
        return first

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {next(self._keys)}", "content-type": "application/json"}


def listens(process: psutil.Process, port: int) -> bool:
    return any(at.laddr.port == port for at in process.net_connections() if at.status == psutil.CONN_LISTEN)


def session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))


def make_keys(state: Path, count: int) -> list[str]:
    catalog = whole_catalog(Paths(state).catalog_url)
    keys = [catalog.keys.create(f"tenant-{number}", "user", limits=LIMITS) for number in range(count)]
    catalog.close()
    return keys


@contextmanager
def bare_engine(ours: Live) -> Iterator[tuple[str, int]]:
    """Start the same engine without the gateway; return its address and its process."""
    port = free_port()
    engine = ours.params.engine.model_copy(update={"port": port})
    params = ours.params.model_copy(update={"engine": engine})
    file = params.paths.root / "bare.json"
    file.write_text(params.model_dump_json())
    with (params.paths.root / "bare.log").open("wb") as log:
        process = start_reaped([str(HERE / "_no_gateway.py"), "--params", str(file)], log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        stop_reaped(process)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(url, timeout=5)
            return
        except httpx.TransportError:
            time.sleep(0.2)
    sys.exit(f"bench gateway: nothing answers at {url}.")


async def warm(side: Side, clients: int, tokens: int) -> None:
    """Ask with each key once, so that it is known before anything is measured."""
    await side.load(clients, -(-side.key_count // clients), 1)
    await side.load(clients, 1, tokens)


def loads(sides: Mapping[str, Side], clients: int, tokens: int, number: int) -> dict[str, float]:
    """Return the throughput and the CPU of one pair of loads."""
    found = {
        name: asyncio.run(sides[name].load(clients, 2, tokens)) for name in record.in_turn(sides, number)
    }
    (ours_s, ours_cpu), (bare_s, bare_cpu) = found["ours"], found["bare"]
    return {"throughput": ours_s / bare_s, "added_cpu_ms": 1000 * (ours_cpu - bare_cpu)}


def one_client(sides: Mapping[str, Side], number: int) -> dict[str, float]:
    """Return the difference of the median seconds of requests for one token, one after another."""

    async def median_s(side: Side) -> float:
        async with session(side.url) as asking:
            data = body(side.model, 1, False)
            # The first one connects.
            times = [await side.ask(asking, data) for _ in range(1 + ONE_CLIENT)]
        return statistics.median(times[1:])

    found = {name: asyncio.run(median_s(sides[name])) for name in record.in_turn(sides, number)}
    return {"added_p50_ms": 1000 * (found["ours"] - found["bare"])}


async def refused_cpu_s(url: str, process: psutil.Process, count: int) -> float:
    """Return the CPU seconds of a request with a bad key; every key is another one."""
    async with session(url) as asking:

        async def client(each: int) -> None:
            for _ in range(each):
                headers = {"authorization": f"Bearer gw-{secrets.token_hex(20)}"}
                async with asking.post("/v1/completions", data=b"{}", headers=headers) as response:
                    assert response.status == 401
                    await response.read()

        await client(100)
        before = sum(process.cpu_times()[:2])
        await asyncio.gather(*(client(count // 8) for _ in range(8)))
        return (sum(process.cpu_times()[:2]) - before) / count


@contextmanager
def refusing(kind: str, state: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server that refuses every key, `bare` or `gateway`; return its address and its process."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(HERE / "_refusing.py"), kind, str(port), str(state)])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def refusals(servers: Mapping[str, tuple[str, psutil.Process]], number: int) -> dict[str, float]:
    """Return the ratio of a refusal's CPU: the gateway's over a bare ASGI app's."""
    found = {
        kind: asyncio.run(refused_cpu_s(*servers[kind], REFUSALS)) for kind in record.in_turn(servers, number)
    }
    return {"refused_over_bare": found["gateway"] / found["bare"]}


@contextmanager
def bad_keys(url: str) -> Iterator[None]:
    """Have another process call with bad keys; it must be refused as often as it should ask."""
    command = [sys.executable, str(HERE / "_bad_keys.py"), url, str(BAD_PER_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            process.stdout.readline()
            yield
            said = process.communicate(timeout=60)[0]
            if float(said) < 0.95 * BAD_PER_S:
                sys.exit(f"bench gateway: {float(said):.0f} of {BAD_PER_S} bad keys a second were refused.")
        finally:
            process.kill()


async def ttft_p95(ours: Side, count: int) -> float:
    """Return the p95 seconds of requests, one after another, to the first byte of their streams."""
    async with session(ours.url) as asking:
        times = [await ours.ask(asking, body(ours.model, 8, True)) for _ in range(count)]
    return statistics.quantiles(times, n=20)[-1]


def with_bad_keys(ours: Side, elsewhere: str, each: int, number: int) -> dict[str, float]:
    """Return the ratio of warm requests' p95 to the first byte, with 500 bad keys a second and without.

    Without, the same calls go to another server: who calls takes a share of these cores too.
    """
    found = {}
    for side in record.in_turn((elsewhere, ours.url), number):
        with bad_keys(side):
            found[side] = asyncio.run(ttft_p95(ours, each))
    return {"ttft_p95_with_bad_keys": found[ours.url] / found[elsewhere]}


async def revoked_s(state: Path, url: str) -> float:
    """Return the seconds from a key's revocation to the first refusal, asked all the time."""
    catalog = whole_catalog(Paths(state).catalog_url)
    key = catalog.keys.create("leaver", "user")
    async with session(url) as asking:

        async def status() -> int:
            headers = {"authorization": f"Bearer {key}"}
            async with asking.get("/v1/models", headers=headers) as response:
                return response.status

        assert await status() == 200
        catalog.keys.revoke(key)
        began = time.monotonic()
        while await status() != 401:
            pass
    catalog.close()
    return time.monotonic() - began


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=list(SHAPES), default="tiny-dense")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--keys", type=int, default=1000)
    args = parser.parse_args()
    run = Run("gateway", args.long)
    params = load_params(args.params)
    params.paths.root.mkdir(parents=True, exist_ok=True)
    figures, is_equal = record.Figures(), True
    with run.preparing(), tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        migrate(Paths(Path(folder)).catalog_url)
        make_keys(Path(folder), args.keys)
        kinds = ("bare", "gateway")
        servers = {kind: stack.enter_context(refusing(kind, Path(folder))) for kind in kinds}
        figures.add_pairs(run.pairs("refusals, pair", partial(refusals, servers), BOUNDS, share=0.15))
        loops = [measure(LOOPS) for _ in range(5)]
        figures.add({name: [found[name] for found in loops] for name in loops[0]})
    with run.preparing(), ExitStack() as stack:
        run.go_on()
        ours = stack.enter_context(live(params, args.base, params.paths.root))
        url, pid = stack.enter_context(bare_engine(ours))
        elsewhere, _ = stack.enter_context(refusing("bare", HERE))
        state = ours.params.paths.root
        mine = Side(ours.server.url, make_keys(state, args.keys), ours.roots[0], ours.base.name)
        its = Side(url, ["none"], pid, ours.base.name)
        is_equal = asyncio.run(mine.text(args.tokens)) == asyncio.run(its.text(args.tokens))
        sides = {"ours": mine, "bare": its}
        for side in sides.values():
            asyncio.run(warm(side, args.clients, args.tokens))
        figures.add({"revoked_s": [max(asyncio.run(revoked_s(state, mine.url)) for _ in range(5))]})
        each = 200 if run.is_long else 100
        parts = {
            "one client, pair": (0.2, partial(one_client, sides)),
            "loads, pair": (0.6, partial(loads, sides, args.clients, args.tokens)),
            "bad keys, pair": (1.0, partial(with_bad_keys, mine, elsewhere, each)),
        }
        for what, (share, take) in parts.items():
            figures.add_pairs(run.pairs(what, take, BOUNDS, share=share))
    record.report(run, figures, BOUNDS, is_equal, args.out)


if __name__ == "__main__":
    start(main)
