"""A Postgres server that says nothing for a while: users of resident champions notice nothing."""

import asyncio
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
import uvicorn

from engine.catalog.catalog import migrate
from engine.errors import NotFound
from engine.serving.gateway import catalog_rows
from engine.serving.gateway.host_tier_upkeep import HostTierUpkeep
from engine.settings.params import Params
from tests.helpers.gateways import CHAMPION, OTHER, World, open_world
from tests.helpers.haproxy import balanced
from tests.helpers.live import free_port
from tests.helpers.postgres import fresh_database, postgres

TURN = {"model": "acme-sums", "prompt": "one two three", "max_tokens": 2}
pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the address of a server that these tests alone pause."""
    with postgres() as url:
        yield url


@pytest.fixture
def world(server: str, tmp_path: Path) -> Iterator[World]:
    url = fresh_database(server)
    migrate(url)
    world = open_world(tmp_path, url=url)
    world.server.step_s = 0.01
    yield world
    world.close()


class Paused:
    """A context in which every process of a Postgres server stands still; its kernel still acknowledges."""

    def __init__(self, url: str):
        with psycopg.connect(url) as connection:
            backend = psutil.Process(connection.info.backend_pid)
            main = backend.parent()
            assert main is not None
            self._main = main
        self._stopped: list[psutil.Process] = []

    def __enter__(self) -> None:
        # The main process first, so that it starts no other meanwhile.
        for process in (self._main, *self._main.children()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
                self._stopped.append(process)

    def __exit__(self, *_: object) -> None:
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


class RunningTime:
    """Seconds in which this process ran, counted by a thread in the block.

    Whoever waits for the server lets the thread run; a pause of the machine or of the process stops both.
    """

    # Of a longer time between two looks the thread did not run.
    MOST_S = 0.1

    def __init__(self) -> None:
        self.now = 0.0
        self._is_over = threading.Event()

    def __enter__(self) -> "RunningTime":
        threading.Thread(target=self._count, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _count(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(0.01):
            now = time.monotonic()
            self.now += min(now - before, self.MOST_S)
            before = now


class Stalls:
    """The longest time for which the event loop did nothing else, in seconds of a clock."""

    def __init__(self, clock: RunningTime) -> None:
        self.longest, self._clock = 0.0, clock

    async def run(self) -> None:
        before = self._clock.now
        while True:
            await asyncio.sleep(0.01)
            now = self._clock.now
            self.longest, before = max(self.longest, now - before), now


@asynccontextmanager
async def behind_haproxy(world: World) -> AsyncIterator[Callable[[str], httpx.AsyncClient]]:
    """Serve the gateway behind HAProxy; yield what returns a client with a key."""
    port = free_port()
    config = uvicorn.Config(world.app, port=port, lifespan="off", log_level="error", access_log=False)
    gateway = uvicorn.Server(config)
    serving = asyncio.create_task(gateway.serve())

    def client(key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    async with asyncio.timeout(60):
        while not gateway.started:
            await asyncio.sleep(0.01)
    with balanced(Params(), [f"http://127.0.0.1:{port}"], world.root) as url:
        yield client
    gateway.should_exit = True
    await serving


async def paused(server: str, world: World, seconds: float) -> None:
    """Users ask behind HAProxy while the server stands still: everybody is answered, at once."""
    state = world.state
    known, unseen = world.key(), world.key()
    upkeep = HostTierUpkeep(state.residency, state.router)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(behind_haproxy(world))
        users, stranger = [await stack.enter_async_context(client(key)) for key in (known, unseen)]
        clock = stack.enter_context(RunningTime())
        stalls = Stalls(clock)

        async def ask() -> float:
            began = clock.now
            answer = await users.post("/v1/completions", json=TURN)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-graftwork-revision"] == f"acme-sums@{CHAMPION[:12]}"
            return clock.now - began

        async def stream() -> int:
            body = TURN | {"stream": True, "max_tokens": 100}
            answer = await users.post("/v1/completions", json=body)
            assert answer.status_code == 200
            return answer.text.count('"x"')

        async with asyncio.timeout(60):
            while (await users.post("/v1/completions", json=TURN)).status_code != 200:
                await asyncio.sleep(0.1)
        # An engine that was ready once.
        async with world.client(None) as check:
            assert (await check.get("/graftwork/ready")).status_code == 200
        running = [asyncio.create_task(stalls.run()), asyncio.create_task(upkeep.run())]
        waits, streams = [], [asyncio.create_task(stream())]
        end = time.monotonic() + seconds
        with Paused(server):
            lost = asyncio.create_task(stranger.post("/v1/completions", json=TURN))
            while time.monotonic() < end:
                waits.append(await ask())
                streams.append(asyncio.create_task(stream()))
                await asyncio.sleep(0.1)
            # Whoever needs what is not kept is told soon.
            assert (await lost).status_code == 503
        assert await asyncio.gather(*streams) == [100] * len(streams)
        for task in running:
            task.cancel()
        # The first one waits for the look; a loop that waited for the server itself would stand for 2 s.
        assert sorted(waits)[-2] < 1.5
        assert stalls.longest < 1.5
        async with asyncio.timeout(60):
            while (await stranger.post("/v1/completions", json=TURN)).status_code != 200:
                await asyncio.sleep(0.1)


async def test_users_of_a_silent_catalog_are_served(server: str, world: World) -> None:
    await paused(server, world, 5.0)


@pytest.mark.slow
async def test_users_of_a_catalog_that_fails_over_are_served(server: str, world: World) -> None:
    await paused(server, world, 20.0)


async def test_a_canary_ends_with_the_catalog_s_voice(server: str, world: World) -> None:
    """What may have been rolled back is served no more; a row that has changed is asked for again."""
    catalog, router = world.catalog, world.state.router
    route = catalog.routes.get("acme-sums")
    route = catalog.routes.update(replace(route, canary=OTHER, weight=0.999, salt="fixed"), route.version)

    async def arm() -> str:
        return (await router.admit("acme-sums", "ann"))[0].arm

    assert await arm() == "canary"
    with Paused(server):
        async with asyncio.timeout(60):
            while await arm() == "canary":
                await asyncio.sleep(0.05)
        # From then on nobody waits.
        with RunningTime() as clock:
            assert [await arm() for _ in range(20)] == ["champion"] * 20
            assert clock.now < 1.0
    async with asyncio.timeout(60):
        while await arm() != "canary":
            await asyncio.sleep(0.05)
    catalog.tombstones.add("acme-sums", OTHER, "It was bad.", "controller")
    async with asyncio.timeout(60):
        while await arm() != "champion":
            await asyncio.sleep(0.05)


async def test_nothing_is_read_on_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query of a request, whatever it needs, is made in another thread."""
    access, on_loop, reads = world.catalog.access, [], 0
    key = world.catalog.keys.create("acme", ["infer", "pin"], ["acme-*"])

    def noted(read: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            if threading.current_thread() is threading.main_thread():
                on_loop.append("".join(traceback.format_stack(limit=6)))
            return read(*args)

        return call

    for name in ("read", "quick"):
        monkeypatch.setattr(access, name, noted(getattr(access, name)))
    router = world.state.router
    upkeep = HostTierUpkeep(world.state.residency, router)
    models = ["acme-sums", "acme-nobody", "tiny", *(f"acme-sums@{OTHER[:length]}" for length in (4, 12))]
    async with world.client(key) as users:
        for model in models:
            await users.post("/v1/completions", json=TURN | {"model": model})
        for path in ("/v1/models", "/graftwork/ready", "/v1/models/acme-sums"):
            assert (await users.get(path)).status_code == 200
        assert (await users.post("/v1/prewarm", json={"model": f"acme-sums@{OTHER[:12]}"})).status_code == 202
        await upkeep.look()
    with pytest.raises(NotFound):
        await router.admit("nobody", "ann")
    assert reads > 10
    assert on_loop == []


async def test_a_row_that_changes_while_it_is_read_is_read_again(world: World) -> None:
    """A thread looks while another reads: the row is as old as the look before its query."""
    catalog, router = world.catalog, world.state.router
    get, changed = catalog.routes.get, []

    def slow(policy: str) -> Any:
        found = get(policy)
        if not changed:
            changed.append(catalog.routes.update(replace(found, champion=OTHER), found.version))
            time.sleep(2 * catalog_rows.POLL_S)
            router.take_changed()
        return found

    catalog.routes.get = slow  # type: ignore[method-assign]
    assert (await router.admit("acme-sums", "ann"))[0].digest == CHAMPION
    assert (await router.admit("acme-sums", "ann"))[0].digest == OTHER


async def test_a_canary_that_is_rolled_back_while_its_row_is_read_answers_nobody(world: World) -> None:
    catalog, router = world.catalog, world.state.router
    standing, told = catalog.revisions.standing, []

    def change(**changes: Any) -> None:
        route = catalog.routes.get("acme-sums")
        catalog.routes.update(replace(route, **changes), route.version)

    def slow(policy: str, digest: str) -> Any:
        found = standing(policy, digest)
        if digest == OTHER and not told:
            told.append(digest)
            catalog.tombstones.add("acme-sums", OTHER, "It was bad.", "controller")
            time.sleep(2 * catalog_rows.POLL_S)
            router.take_changed()
        return found

    change(canary=OTHER, weight=0.999, salt="fixed")
    async with world.client(world.key()) as users:

        async def revision() -> str:
            answer = await users.post("/v1/completions", json=TURN | {"user": "ann"})
            assert answer.status_code == 200
            return answer.headers["x-graftwork-revision"]

        async with asyncio.timeout(60):
            while await revision() != f"acme-sums@{OTHER[:12]}":
                await asyncio.sleep(0.01)
        # Its rows are read again.
        change(weight=0.99)
        await asyncio.sleep(2 * catalog_rows.POLL_S)
        catalog.revisions.standing = slow  # type: ignore[method-assign]
        assert await revision() == f"acme-sums@{CHAMPION[:12]}"
    assert told == [OTHER]
