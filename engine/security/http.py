"""ASGI middlewares in front of a service, and the address and TLS options of its server.

A Host allow-list stops DNS rebinding: a web page whose name resolves to 127.0.0.1 still sends its own name.
"""

import hmac
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.settings.services import Listener

# What a supervisor or a load balancer asks without a key.
HEALTH = "/health"


class KeyRequired:
    """Refuse every request without `Authorization: Bearer KEY`, except for the paths in `open_paths`."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str] = (HEALTH,)):
        self.app, self.key, self.open_paths = app, key, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if (
            scope["type"] == "lifespan"
            or scope["path"] in self.open_paths
            or self._knows(Headers(scope=scope))
        ):
            return await self.app(scope, receive, send)
        said = "This call needs the header `Authorization: Bearer KEY` with the service's key."
        body = {"kind": "Unauthorized", "error": said}
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and same(given.strip(), self.key)


def same(given: str, wanted: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())


class WithoutCookies:
    """Drop cookies: nothing here reads them, and FastAPI parses them for every route.

    Python's parser takes time by the square of their length (CVE-2024-7592): seconds for 30 KB.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without them."""
        if scope["type"] == "http":
            scope["headers"] = [header for header in scope["headers"] if header[0] != b"cookie"]
        await self.app(scope, receive, send)


def trusted(app: ASGIApp, listener: Listener) -> ASGIApp:
    """Return the app behind a Host allow-list: 400 for a name that is not the listener's."""
    return TrustedHostMiddleware(WithoutCookies(app), listener.names, www_redirect=False)


def guarded(app: ASGIApp, listener: Listener, key: str) -> ASGIApp:
    """Return the app behind a Host allow-list and a key."""
    return trusted(KeyRequired(app, key), listener)


def server_options(listener: Listener) -> dict[str, Any]:
    """Return the address and TLS options of `uvicorn.Config`, and the limits of a connection."""
    tls = {"ssl_certfile": listener.tls_certificate, "ssl_keyfile": listener.tls_key}
    return {
        "host": str(listener.listen),
        "port": listener.port,
        "http": "engine.security.uvicorn_limits:LimitedProtocol",
        **({name: str(path) for name, path in tls.items()} if listener.tls_certificate else {}),
    }
