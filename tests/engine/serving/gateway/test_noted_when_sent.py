"""Behind a proxy nothing is noted of an answer that has not left: the proxy asks another engine for it."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import uvicorn
import uvloop

from engine.security.http import LimitedProtocol
from engine.settings.services import GatewayConfig
from tests.helpers.gateways import World, open_world

# Of an answer whose length is not told ahead.
BEGINNING, END = b"HTTP/1.1 200 OK", b"0\r\n\r\n"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(open_world(tmp_path, GatewayConfig(proxy_sets_id=True))) as opened:
        yield opened


async def received_at_each_note(world: World, is_stream: bool, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Ask for an answer; return what its client's socket held when the log was told of it."""
    held: dict[str, bytes] = {}
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(world.app, http=LimitedProtocol, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        await server.startup([listener])
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())

        def note(what, plain, *args):
            held[what] = b""
            with suppress(BlockingIOError):
                held[what] = client.recv(1 << 16, socket.MSG_PEEK)
            plain(*args)

        for what in ("note_beginning", "settle"):
            patch.setattr(world.usage, what, partial(note, what, getattr(world.usage, what)))
        body = {"model": "acme-sums", "prompt": "one", "max_tokens": 1, "stream": is_stream}
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {world.key()}\r\n"
        sent = json.dumps(body).encode()
        await loop.sock_sendall(client, f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        async with asyncio.timeout(30):
            while "settle" not in held:
                await asyncio.sleep(0.001)
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
    return held


def test_a_whole_answer_has_left_when_its_end_is_noted(world, monkeypatch):
    held = uvloop.run(received_at_each_note(world, False, monkeypatch))
    assert held.keys() == {"settle"}
    assert held["settle"].startswith(BEGINNING)
    assert held["settle"].endswith(END)


def test_the_beginning_of_a_stream_has_left_when_it_is_noted(world, monkeypatch):
    held = uvloop.run(received_at_each_note(world, True, monkeypatch))
    assert held["note_beginning"].startswith(BEGINNING)
    assert held["settle"].endswith(END)
