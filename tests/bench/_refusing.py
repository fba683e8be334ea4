"""A server that refuses every key: `bare` answers 401 at once, `gateway` is the gateway with a catalog.

python tests/bench/_refusing.py bare|gateway PORT STATE
"""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from engine.security.http import limit_connections

BODY = b'{"error":{"message":"No valid API key was sent.","type":"invalid_request_error"}}'


async def bare(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


def gateway(state: Path) -> Any:
    from engine.catalog.opening import whole_catalog
    from engine.serving.gateway.gateway import Gateway
    from engine.serving.gateway.routing import Router
    from engine.serving.gateway.suggesting import Suggester
    from engine.settings.params import Paths
    from engine.settings.services import GatewayConfig

    router = Router(whole_catalog(Paths(state).catalog_url), "tiny", "base", suggest=Suggester)
    holder = SimpleNamespace(
        state=SimpleNamespace(graftwork=SimpleNamespace(router=router, settings=GatewayConfig()))
    )
    made = Gateway(bare)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = holder
        await made(scope, receive, send)

    return app


def main() -> None:
    import uvloop

    kind, port, state = sys.argv[1:]
    limit_connections()
    app = bare if kind == "bare" else gateway(Path(state))
    # As vLLM's server does once it is up.
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(app, port=int(port), lifespan="off", log_level="error", access_log=False)
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
