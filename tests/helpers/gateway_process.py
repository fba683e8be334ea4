"""A gateway in a process of its own, before a fake of vLLM's server, for tests that kill it.

    python tests/helpers/gateway_process.py STATE PORT STEP_S

The fake notes in STATE/engine.log what reaches it, before it computes anything, and what it computed.
"""

import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

from engine.security.http import limit_connections
from engine.serving.gateway.uvicorn_accept import accept_bursts
from tests.helpers.gateways import FakeVllm, open_world


class NotedVllm(FakeVllm):
    """Notes each request in a file: a line when it comes, and one with its tokens when it has ended."""

    def __init__(self, file: Path, step_s: float):
        super().__init__(step_s)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
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
    root, port, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    world = open_world(root, server=NotedVllm(root / "engine.log", step_s))
    config = uvicorn.Config(
        world.app, port=port, lifespan="off", log_level="error", access_log=False, timeout_keep_alive=75
    )
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
