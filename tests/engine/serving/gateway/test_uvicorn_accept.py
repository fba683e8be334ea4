"""A burst of connections is taken up in a few turns of the event loop, not one in each."""

import asyncio
import socket
import threading
from contextlib import ExitStack

import pytest
import uvicorn
import uvloop

from engine.serving.gateway import uvicorn_accept

CLIENTS = 120


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def taken_up(turns: int) -> int:
    """Return how many of the connections that wait are taken up after so many turns."""
    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as listener, ExitStack() as clients:
        config = uvicorn.Config(app, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        address = listener.getsockname()

        def connect() -> None:
            for _ in range(CLIENTS):
                clients.enter_context(socket.create_connection(address, 10))

        # The loop stands still meanwhile, as in a long turn.
        burst = threading.Thread(target=connect)
        burst.start()
        burst.join()
        for _ in range(turns):
            await asyncio.sleep(0)
        found = len(server.server_state.connections)
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        return found


@pytest.fixture
def plain_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        uvicorn.Server, "startup", getattr(uvicorn.Server.startup, "__wrapped__", uvicorn.Server.startup)
    )


def test_a_burst_is_taken_up_in_a_few_turns(plain_server):
    assert uvloop.run(taken_up(20)) < CLIENTS / 2
    uvicorn_accept.accept_bursts()
    uvicorn_accept.accept_bursts()
    assert uvloop.run(taken_up(20)) == CLIENTS
