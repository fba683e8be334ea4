"""The server's end: requests under way end whole, new ones go elsewhere, the engine is stopped last."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from starlette.datastructures import State

from engine.serving.vllm_plugin.leaving import end_requests_first
from tests.helpers.live import free_port

PIECES = 6


class Site:
    """A server, and an engine's client whose `shutdown` is ours."""

    def __init__(self, limit_s: float):
        self.url = f"http://127.0.0.1:{free_port()}"
        port = int(self.url.rpartition(":")[2])
        config = uvicorn.Config(self.app, port=port, log_level="error", lifespan="off", interface="asgi3")
        self.server = uvicorn.Server(config)
        # A request is under way; answers may go on after their first piece.
        self.is_busy, self.may_end = asyncio.Event(), asyncio.Event()
        self.events: list[str] = []
        self.client = SimpleNamespace(shutdown=lambda timeout: self.events.append(f"stopped {timeout:g}"))
        self.state, self.limit_s = State(), limit_s
        self.state.server = self.server

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer in pieces."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(PIECES):
            await send({"type": "http.response.body", "body": b"x", "more_body": number < PIECES - 1})
            self.is_busy.set()
            await self.may_end.wait()

    async def start(self) -> "asyncio.Task[None]":
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        say = self.events.append
        calls = [partial(say, text) for text in ("leaving", "settled", "handed over")]
        end_requests_first(self.client, self.state, self.limit_s, *calls)
        return task


async def get(client: httpx.AsyncClient, url: str) -> int:
    return len((await client.get(url)).content)


async def is_refused(client: httpx.AsyncClient, url: str) -> bool:
    """Return whether nobody listens any more; a connection that is taken up meanwhile has no answer."""
    try:
        await client.get(url, timeout=1)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        pass
    return False


async def test_what_is_under_way_ends_whole_before_the_engine() -> None:
    site = Site(limit_s=10)
    serving = await site.start()
    async with httpx.AsyncClient() as idle, httpx.AsyncClient() as busy, httpx.AsyncClient() as late:
        site.may_end.set()
        assert await get(idle, site.url) == PIECES
        site.may_end.clear()
        site.is_busy.clear()
        under_way = asyncio.create_task(get(busy, site.url))
        await site.is_busy.wait()
        leaving = asyncio.create_task(asyncio.to_thread(site.client.shutdown, timeout=15))
        while not await is_refused(late, site.url):
            await asyncio.sleep(0.01)
        assert site.events == ["leaving"]
        site.may_end.set()
        assert await under_way == PIECES
        await leaving
    assert site.events == ["leaving", "settled", "handed over", "stopped 5"]
    # vLLM calls it once more, on the loop.
    site.client.shutdown(timeout=15)
    assert site.events[4:] == ["stopped 5"]
    site.server.should_exit = True
    await serving


async def test_a_request_that_takes_too_long_is_cut() -> None:
    site = Site(limit_s=0.2)
    serving = await site.start()
    async with httpx.AsyncClient() as busy:
        under_way = asyncio.create_task(get(busy, site.url))
        await site.is_busy.wait()
        await asyncio.to_thread(site.client.shutdown, timeout=1)
        assert site.events == ["leaving", "settled", "handed over", "stopped 1"]
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
    site.server.should_exit = site.server.force_exit = True
    await serving
