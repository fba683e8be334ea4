"""The engine's Host allow-list, as a middleware of vLLM's server."""

from typing import ClassVar

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp


class HostAllowList(TrustedHostMiddleware):
    """Answer 400 to a request whose Host header is none of `names`.

    vLLM gives a middleware no arguments, so the server sets `names` before it starts.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, app: ASGIApp):
        super().__init__(app, self.names, www_redirect=False)
