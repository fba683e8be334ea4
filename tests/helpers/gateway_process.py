"""A gateway in a process of its own, before a fake of vLLM's server, for tests that kill it.

    python tests/helpers/gateway_process.py STATE PORT STEP_S [CATALOG]

With a CATALOG in Postgres it is one of several, behind a proxy that sets ids. The fake notes in
STATE/engine.log what reaches it, before it computes anything, and what it computed.
"""

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

from engine.metering.shared_budgets import SharedBudgets
from engine.security.http import limit_connections
from engine.serving.gateway.uvicorn_accept import accept_bursts
from engine.settings.services import GatewayConfig
from tests.helpers.gateways import OWN, FakeVllm, open_world, own_endpoints


class NotedVllm(FakeVllm):
    """Notes each request in a file: a line when it comes, and one with its tokens when it has ended."""

    def __init__(self, file: Path, step_s: float):
        super().__init__(step_s)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith(OWN):
            return await super().__call__(scope, receive, send)
        headers = dict(scope["headers"])
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body", "body": b""})
        name = headers[b"x-request-id"].decode()
        os.write(self._file, f"began {name} 0 0\n".encode())
        try:
            await super().__call__(scope, receive, send)
        finally:
            prompt, completion = self.finished.get(name, (0, 0))
            os.write(self._file, f"ended {name} {prompt} {completion}\n".encode())


def main() -> None:
    import uvloop

    # As `engine.serving.server` does.
    accept_bursts()
    limit_connections()
    root, port, step_s, *urls = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]
    server = NotedVllm(root / "engine.log", step_s)
    if urls:
        settings, shared = GatewayConfig(proxy_sets_id=True), SharedBudgets(urls[0])
        world = open_world(root, settings, server=server, url=urls[0], shared=shared)
        server.own = own_endpoints(world.state, world.catalog, root.name)
    else:
        world = open_world(root, server=server)
    config = uvicorn.Config(
        world.app, port=port, lifespan="off", log_level="error", access_log=False, timeout_keep_alive=75
    )
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
