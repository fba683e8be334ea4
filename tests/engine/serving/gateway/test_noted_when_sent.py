"""Behind a proxy, the usage log is told that an answer has begun or ended once its bytes have left."""

import asyncio
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import uvicorn
import uvloop

from engine.security.http import LimitedProtocol
from engine.settings.services import GatewayConfig
from tests.helpers.gateways import World, open_world

PATHS = ["/v1/completions", "/v1/chat/completions"]
# How long the kernel may take to pass on what was sent.
PASSED_ON_S = 1.0
# The first and last bytes of a chunked response.
BEGINNING, END = b"HTTP/1.1 200 OK", b"0\r\n\r\n"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(open_world(tmp_path, GatewayConfig(proxy_sets_id=True))) as opened:
        yield opened


async def received_at_each_note(
    world: World, path: str, is_stream: bool, patch: pytest.MonkeyPatch
) -> dict[str, bytes]:
    """Send a request; return what its client's socket held at each call of the log."""
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
            # Nothing is sent meanwhile, since this is on the event loop.
            wanted, until = {"note_beginning": BEGINNING, "settle": END}[what], time.monotonic() + PASSED_ON_S
            held[what] = b""
            while wanted not in held[what] and (left := until - time.monotonic()) > 0:
                if select.select([client], [], [], left)[0]:
                    held[what] = client.recv(1 << 16, socket.MSG_PEEK)
            plain(*args)

        for what in ("note_beginning", "settle"):
            patch.setattr(world.usage, what, partial(note, what, getattr(world.usage, what)))
        asked = {"messages": [{"role": "user", "content": "one"}]} if "chat" in path else {"prompt": "one"}
        body = {"model": "acme-sums", "max_tokens": 1, "stream": is_stream, **asked}
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {world.key()}\r\n"
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


@pytest.mark.parametrize("path", PATHS)
def test_a_whole_answer_has_left_when_its_end_is_noted(world, monkeypatch, path):
    held = uvloop.run(received_at_each_note(world, path, False, monkeypatch))
    assert held.keys() == {"settle"}
    assert held["settle"].startswith(BEGINNING)
    assert held["settle"].endswith(END)


# The first piece of a chat's answer follows its beginning in the same turn of the loop.
@pytest.mark.parametrize("path", PATHS)
def test_the_beginning_of_a_stream_has_left_when_it_is_noted(world, monkeypatch, path):
    held = uvloop.run(received_at_each_note(world, path, True, monkeypatch))
    assert held["note_beginning"].startswith(BEGINNING)
    assert held["settle"].endswith(END)
