"""Whose key a call carries, remembered for a moment: a client polls for each of its results."""

import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.catalog.catalog import Key
from engine.errors import GraftworkError, Unauthorized
from engine.tinker.models import Models

ROLE = "train"
# Calls that need a key, and the one below them that needs none.
API, HEALTHZ = "/api/v1/", "/api/v1/healthz"
# A revoked key, or a suspended tenant's, is refused after this; so many callers are remembered.
KNOWN_S, MOST_KNOWN = 2.0, 1024


class KeyFirst:
    """Check the key of a call before a byte of its body is read; the route finds it in `state.key`.

    Used on the event loop only.
    """

    def __init__(self, app: ASGIApp, models: Models):
        self.app, self.models = app, models
        self._known: dict[str, tuple[Key, float]] = {}

    async def find(self, plaintext: str) -> Key:
        """Return the key with this plaintext. Raises `Unauthorized` unless it is in force and may train.

        Raises `Forbidden` while its tenant is suspended.
        """
        now = time.monotonic()
        known = self._known.get(plaintext)
        if known and now < known[1]:
            return known[0]
        self._known.pop(plaintext, None)
        key = await self.models.ask(self.models.catalog.keys.find, plaintext)
        if key is None:
            raise Unauthorized(
                "No valid API key was sent in X-API-Key. `graftwork key create --tinker` makes a key; set it "
                "as TINKER_API_KEY."
            )
        if not key.may(ROLE):
            raise Unauthorized(f"This key lacks the role {ROLE!r}. Create one with --tinker.")
        (await self.models.ask(self.models.catalog.keys.tenant, key.owner)).refuse_suspended()
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[plaintext] = key, now + KNOWN_S
        return key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer why its key is refused."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith(API) and path != HEALTHZ:
            try:
                key = await self.find(Headers(scope=scope).get("x-api-key", ""))
            except GraftworkError as error:
                return await JSONResponse({"detail": str(error)}, error.status)(scope, receive, send)
            scope.setdefault("state", {})["key"] = key
        await self.app(scope, receive, send)
