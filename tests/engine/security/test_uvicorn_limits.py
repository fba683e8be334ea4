"""Connections that send too many headers, too slowly, or nothing: they end, and others are served."""

import asyncio
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import uvicorn
import uvloop

from engine.security import http
from engine.security.http import trusted
from engine.serving.gateway.gateway import Gateway
from engine.serving.host_allow_list import HostAllowList
from engine.settings.params import Params
from tests.helpers.live import free_port

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def app(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Running:
    """A server with our limits."""

    app = staticmethod(app)

    async def __aenter__(self) -> int:
        http.limit_connections()
        port = free_port()
        config = uvicorn.Config(
            self.app, port=port, lifespan="off", log_level="critical", timeout_keep_alive=600
        )
        self.server = uvicorn.Server(config)
        self.task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        return port

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self.task


async def ask(port: int, *pieces: bytes, wait_s: float = 0.0) -> bytes:
    """Send pieces with pauses, and return what comes until the server closes, or 25 s are over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            # After a pause it may know of the close and of the refusal of its last piece at once.
            if writer.is_closing():
                break
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(wait_s)
        return await asyncio.wait_for(reader.read(1 << 16), 25)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.fixture(autouse=True)
def plain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])


async def huge(port: int) -> list[bytes]:
    at_once = REQUEST + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(80)) + b"\r\n"
    one = REQUEST + b"x: " + b"a" * (100 << 10)
    for_ever = [REQUEST] + [b"x-%d: %s\r\n" % (i, b"a" * 8000) for i in range(20)]
    fine = REQUEST + b"x: " + b"a" * 8000 + b"\r\n\r\n"
    body = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b"b" * 200_000
    return [
        (await ask(port, *pieces, wait_s=0.001))[:12]
        for pieces in ([at_once], [one, b"\r\n\r\n"], for_ever, [fine], [body])
    ]


def test_huge_headers_are_refused_and_a_large_body_is_not():
    async def run() -> list[bytes]:
        async with Running() as port:
            return await huge(port)

    *refused, fine, large = uvloop.run(run())
    # A client that still sends may see the connection's end before the answer.
    assert set(refused) <= {b"HTTP/1.1 431", b""}
    assert b"HTTP/1.1 431" in refused
    assert fine == large == b"HTTP/1.1 200"


def test_idle_and_slow_connections_end_and_others_are_served(monkeypatch: pytest.MonkeyPatch):
    short_s, long_s = 0.5, 600
    monkeypatch.setattr(http, "HEADERS_S", short_s)

    async def run() -> None:
        async with Running() as port:
            slow = asyncio.create_task(ask(port, *[b"G", b"E", b"T", b" "] * 5, wait_s=0.1))
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(199)]
            began = time.monotonic()
            idle.append(await asyncio.open_connection("127.0.0.1", port))
            half = await asyncio.open_connection("127.0.0.1", port)
            half[1].write(REQUEST)
            half[1].write_eof()
            # Whatever this is told after a pause, the server then has all before it, under the short limit.
            await ask(port, REQUEST + b"\r\n")
            monkeypatch.setattr(http, "HEADERS_S", long_s)
            assert (await ask(port, REQUEST + b"\r\n"))[:12] == b"HTTP/1.1 200"
            for reader, _ in (*idle, half):
                # Nothing else ends them so soon: uvicorn keeps a connection alive for `long_s` as well.
                assert await asyncio.wait_for(reader.read(), 60) == b""
            assert time.monotonic() - began > 0.3
            assert not (await slow).startswith(b"HTTP/1.1 200")
            # A second request on a connection has the same time.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST + b"\r\n")
            assert (await reader.read(1 << 16))[:12] == b"HTTP/1.1 200"
            monkeypatch.setattr(http, "HEADERS_S", short_s)
            writer.write(b"GET / HT")
            assert await asyncio.wait_for(reader.read(), 60) == b""
            for _, writer in (*idle, half):
                writer.close()

    uvloop.run(run())


def test_a_whole_answer_comes_in_one_piece_and_the_head_of_a_stream_at_once():
    """A process that is killed after a first piece would leave half an answer."""
    has_head = asyncio.Event()

    async def stream(scope, receive, send):
        if scope["path"] == "/":
            return await app(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await has_head.wait()
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def run() -> None:
        running = Running()
        running.app = stream
        async with running as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(20):
                writer.write(REQUEST + b"\r\n")
                assert (await reader.read(1 << 16)).endswith(b"\r\n\r\nok")
            writer.write(REQUEST.replace(b"/ ", b"/stream ") + b"connection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(1 << 16), 25)).endswith(b"\r\n\r\n")
            has_head.set()
            assert await asyncio.wait_for(reader.read(), 25) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
            writer.close()

    uvloop.run(run())


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"x" * 1000], ids=["many", "one without an end"])
def test_trailers_are_not_taken(trailer: bytes):
    async def run() -> int:
        async with Running() as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED + b"0\r\n" + trailer)
            sent = 0
            with suppress(ConnectionError):
                # The kernel buffers some megabytes of what nobody reads.
                while sent < 64 << 20:
                    writer.write(trailer * 1000)
                    await writer.drain()
                    sent += 1000 * len(trailer)
            writer.close()
            return sent

    assert uvloop.run(run()) < 32 << 20


def test_who_has_an_answer_and_still_sends_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "LINGER_S", 0.2)
    unsent = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nb"

    async def run() -> None:
        async with Running() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(unsent)
            answer = b""
            while piece := await asyncio.wait_for(reader.read(1 << 16), 25):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
            writer.close()

    uvloop.run(run())


def test_who_is_answered_early_and_then_sends_the_rest_keeps_the_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    # Longer than most pauses of the machine, in which the rest would come too late.
    monkeypatch.setattr(http, "LINGER_S", 1.0)
    whole = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

    async def run() -> None:
        async with Running() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            async def answered() -> bytes:
                return await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 25)

            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nb")
            await answered()
            writer.write(b"ody")
            for _ in range(3):
                # Together longer than who sends no rest may linger.
                await asyncio.sleep(0.4)
                writer.write(whole)
                assert (await answered()).startswith(b"HTTP/1.1 200")
            writer.close()

    uvloop.run(run())


@pytest.mark.parametrize("reads", [False, True])
def test_who_does_not_read_an_answer_is_left(monkeypatch: pytest.MonkeyPatch, reads: bool):
    # Who reads must take something within any such time: it is longer than most pauses of the machine.
    monkeypatch.setattr(http, "STALLED_S", 4.0 if reads else 1.0)
    sent, ended = 0, []

    async def endless(scope, receive, send):
        nonlocal sent
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done() and sent < 64:
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            sent += 1
            await asyncio.sleep(0)
        ended.append((await gone)["type"])

    async def run() -> None:
        monkeypatch.setattr(Running, "app", staticmethod(endless))
        async with Running() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST + b"\r\n")
            if reads:
                # Slowly, but it reads: it takes longer than a client that stalls may.
                for _ in range(64):
                    await asyncio.wait_for(reader.readexactly(1 << 20), 25)
                    await asyncio.sleep(0.075)
                writer.close()
            async with asyncio.timeout(60):
                while not ended:
                    await asyncio.sleep(0.01)
            writer.close()

    uvloop.run(run())
    assert ended == ["http.disconnect"]
    # The kernel buffers some megabytes of what nobody reads.
    assert (sent == 64) is reads


async def nothing_sent(message): ...


async def test_cookies_reach_no_app():
    """Python's parser takes seconds for 30 KB of backslashes, and FastAPI parses them for every route."""
    seen = []

    async def noting(scope, receive, send):
        seen.extend(scope["headers"])

    listener = Params().listener("engine")
    scope = {
        "type": "http",
        "headers": [(b"host", b"localhost"), (b"cookie", b'a="' + b"\\" * 30_000 + b'"')],
    }
    await trusted(noting, listener)(scope, None, None)
    ours = type("Ours", (HostAllowList,), {"names": listener.names})
    app = SimpleNamespace(state=SimpleNamespace())
    cookies = [*scope["headers"], (b"cookie", b"a=b")]
    for path in ("/health", "/v1/chat/completions"):
        # The gateway is behind it. While the engine starts it refuses what takes a key itself.
        there = {"headers": cookies, "path": path, "method": "GET", "app": app}
        await ours(Gateway(noting))(scope | there, None, nothing_sent)
    assert seen == [(b"host", b"localhost")] * 2
