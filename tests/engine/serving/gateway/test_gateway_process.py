"""Gateways in processes of their own, on one usage log: many clients at a budget, and kills."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from engine.metering.dead_gateways import close_dead
from engine.metering.usage_rows import connect
from tests.helpers.gateways import open_world
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT
from tests.helpers.usage_rows import usage_rows

COLUMNS = "id, state, prompt, completion, reserved"
PROGRAM = ROOT / "tests/helpers/gateway_process.py"
TURN = {"model": "acme-sums", "prompt": "one two three", "max_tokens": 8}
pytestmark = pytest.mark.services


def started(root: Path, port: int, step_s: float = 0.0, *shared: str) -> subprocess.Popen[bytes]:
    """Start a gateway and wait for it; `shared` is a catalog's URL."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, str(PROGRAM), str(root), str(port), str(step_s), *shared]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    # Its imports take a minute where other services start at the same time.
    deadline = time.monotonic() + 300
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/v1/models")
                return process
            except httpx.TransportError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextmanager
def gateway(root: Path, step_s: float = 0.0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a gateway and wait for it; it is killed at the end."""
    port = free_port()
    process = started(root, port, step_s)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def new_world(root: Path, **limits: float) -> str:
    """Make catalog and usage log in `root`; return a key."""
    world = open_world(root)
    key = world.key(limits=limits)
    world.close()
    return key


def engines_count(root: Path) -> tuple[set[str], dict[str, tuple[int, int]]]:
    """Return the requests that reached the fake engines, and the tokens of those that ended."""
    began, ended = set(), {}
    for line in (root / "engine.log").read_text().splitlines():
        kind, name, prompt, completion = line.split()
        if kind == "began":
            began.add(name)
        else:
            ended[name] = int(prompt), int(completion)
    return began, ended


def logged(root: Path) -> dict[str, tuple[str, int | None, int | None, int]]:
    """Return state, tokens of prompt and completion, and reservation of each request of dead gateways."""
    with closing(connect(root / "usage" / "usage.db")) as connection:
        # The last ones are still in journals.
        close_dead(root / "usage", connection)
    found = usage_rows(root / "usage", COLUMNS)
    assert len(found) == len({row[0] for row in found})
    return {row[0].removeprefix("cmpl-"): row[1:] for row in found}


async def use_up(urls: list[str], key: str, clients: int) -> int:
    """Have clients ask, half of them for streams, until each is refused; return how many were answered."""
    headers, answered = {"authorization": f"Bearer {key}"}, 0

    async def client(number: int) -> None:
        nonlocal answered
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(
            base_url=urls[number % 2], headers=headers, limits=limits, timeout=None
        ) as asking:
            while True:
                body = TURN | ({"stream": True} if number % 4 < 2 else {})
                response = await asking.post("/v1/completions", json=body)
                if response.status_code == 429:
                    return
                assert response.status_code == 200, response.text
                answered += 1

    await asyncio.gather(*(client(number) for number in range(clients)))
    return answered


def budget_of_two_gateways(root: Path, clients: int, budget: int) -> None:
    key = new_world(root, tokens_per_month=budget)
    with gateway(root) as (one, _), gateway(root) as (other, _):
        answered = asyncio.run(use_up([one, other], key, clients))
        # One by one, so that no reservation is under way: what is left is less than a request takes.
        answered += asyncio.run(use_up([one, other], key, 1))
    rows, (began, ended) = logged(root), engines_count(root)
    assert rows.keys() == began == ended.keys()
    assert {name: row[1:3] for name, row in rows.items()} == ended
    used = sum(prompt + completion for prompt, completion in ended.values())
    assert used <= budget < used + max(row[3] for row in rows.values())
    assert answered == len(rows)


def test_clients_of_two_gateways_use_up_a_budget(tmp_path: Path) -> None:
    budget_of_two_gateways(tmp_path, 60, 30_000)


@pytest.mark.slow
def test_500_clients_of_two_gateways_use_up_a_budget(tmp_path: Path) -> None:
    budget_of_two_gateways(tmp_path, 500, 150_000)


async def beside_bad_connections(url: str, key: str, count: int, server: psutil.Process) -> None:
    """Hold connections of every bad kind open, and have warm clients ask: each is answered within 2 s."""
    port = httpx.URL(url).port
    begun = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    # Idle; in the middle of its headers; of a body; half closed; with headers that go on and on.
    kinds = [b"", begun, begun + b"content-length: 100\r\n\r\n{", begun, begun + b"x: " + b"a" * (80 << 10)]
    writers = []
    for number in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        # Most are idle.
        kind = number % (4 * len(kinds))
        if kind < len(kinds):
            writer.write(kinds[kind])
            if kind == 3:
                writer.write_eof()
        writers.append(writer)
    # Those that are idle or slow are there; the others are refused or end.
    async with asyncio.timeout(60):
        while sum(one.status == psutil.CONN_ESTABLISHED for one in server.net_connections()) < 0.8 * count:
            await asyncio.sleep(0.05)
    headers, slowest = {"authorization": f"Bearer {key}"}, 0.0

    async def client() -> None:
        nonlocal slowest
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as asking:
            for number in range(50):
                began = time.monotonic()
                body = TURN | ({"stream": True} if number % 2 else {})
                response = await asking.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                slowest = max(slowest, time.monotonic() - began)

    await asyncio.gather(*(client() for _ in range(8)))
    assert slowest < 20
    for writer in writers:
        writer.close()


def bad_connections(root: Path, count: int) -> None:
    key = new_world(root)
    with gateway(root) as (url, process):
        asyncio.run(beside_bad_connections(url, key, count, psutil.Process(process.pid)))
        assert process.poll() is None
    rows, (began, ended) = logged(root), engines_count(root)
    assert rows.keys() == began == ended.keys()
    assert len(rows) == 400


def test_500_bad_connections_stop_no_warm_traffic(tmp_path: Path) -> None:
    bad_connections(tmp_path, 500)


@pytest.mark.slow
def test_10_000_bad_connections_stop_no_warm_traffic(tmp_path: Path) -> None:
    bad_connections(tmp_path, 10_000)


async def ask_until_killed(url: str, key: str, process: subprocess.Popen[bytes], after: int) -> None:
    """Have clients ask, and kill the gateway after so many answers, in the middle of others."""
    headers, answers = {"authorization": f"Bearer {key}"}, 0

    async def client(number: int) -> None:
        nonlocal answers
        body = TURN | ({"stream": True} if number % 2 else {})
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as asking:
            while True:
                response = await asking.post("/v1/completions", json=body)
                assert response.status_code == 200
                answers += 1
                if answers == after:
                    process.send_signal(signal.SIGKILL)

    asking = [asyncio.create_task(client(number)) for number in range(12)]
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(one, httpx.TransportError) for one in ended)


def kills(root: Path, times: int) -> None:
    """Every request that reached the engine is in the log, once; what a kill left open is `unknown`."""
    key, rng = new_world(root), random.Random(0)
    for _ in range(times):
        with gateway(root, step_s=0.002) as (url, process):
            asyncio.run(ask_until_killed(url, key, process, rng.randint(20, 80)))
    with closing(connect(root / "usage" / "usage.db")) as connection:
        close_dead(root / "usage", connection)
        counted = connection.execute(
            "SELECT sum(requests), sum(prompt + completion), sum(unknown) FROM hours"
        ).fetchone()
        (spent,) = connection.execute(
            "SELECT used FROM spent WHERE subject = 'tenant:acme' LIMIT 1"
        ).fetchone()
    rows, (began, ended) = logged(root), engines_count(root)
    assert began <= rows.keys()
    # Admitted, and killed before it was forwarded: a few for each kill at the most.
    assert len(rows) - len(began) <= 12 * times
    assert len(rows) >= 20 * times
    settled = {name: row[1:3] for name, row in rows.items() if row[0] == "settled"}
    assert all(ended[name] == used for name, used in settled.items())
    assert {row[0] for row in rows.values()} == {"settled", "unknown"}
    used = sum(map(sum, settled.values()))
    bound = sum(row[3] for row in rows.values() if row[0] == "unknown")
    assert counted == (len(rows), used, bound)
    assert spent == used + bound


def test_killed_gateways_lose_no_request(tmp_path: Path) -> None:
    kills(tmp_path, 3)


@pytest.mark.slow
def test_a_hundred_killed_gateways_lose_no_request(tmp_path: Path) -> None:
    kills(tmp_path, 100)
