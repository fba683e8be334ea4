"""Who calls the controller, and what the caller may do.

Every path but `HEALTH` needs a credential: an admin key of the catalog, or the controller's own, which
reads and delivers notices; for `METRICS` a key with that role is enough, and for `EVENTS` the credential that
processes elsewhere hold. A browser logs in with one of them
as its password (basic authentication). It then sends the password with every request, also from other pages,
so a password only reads.
"""

import base64
from binascii import Error
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.catalog.access import ACTING, Actor, acting
from engine.catalog.catalog import Catalog
from engine.catalog.keys import LOCAL
from engine.errors import ConfigError, GraftworkError, Unauthorized
from engine.security.http import HEALTH, same

SAFE_METHODS = ("GET", "HEAD")
METRICS = "/metrics"
EVENTS = "/events/"
NEEDED = "This call needs the header `Authorization: Bearer KEY` with a valid admin key."
CHALLENGE = 'Basic realm="Graftwork (user graftwork, password by graftwork login)"'
SMALL_BODY = 1 << 16


@dataclass(frozen=True)
class Operator:
    """Who calls: the owner of the credential, and whether it may change something."""

    owner: str
    is_admin: bool

    def named(self, by: str | None) -> str:
        """Return the name to record for a decision, `by` if the caller gave one; it goes into the audit log.

        Anyone's key but the installation's own may claim any name, so its owner's stands beside it.
        """
        if not by or by == self.owner:
            return self.owner
        ACTING.set(Actor(self.owner, by))
        return by if self.owner == LOCAL else f"{by} (key of {self.owner})"


class CredentialRequired:
    """Let a known caller in, before its body is read; answer anyone else 401."""

    def __init__(self, app: ASGIApp, catalog: Catalog, own: str, events: str):
        """`own` is the controller's own credential, `events` the one that only delivers events."""
        self.app, self.catalog, self.own, self.events = app, catalog, own, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its caller in the state."""
        if scope["type"] == "http" and scope["path"] != HEALTH:
            authorization = Headers(scope=scope).get("authorization", "")
            try:
                caller = await run_in_threadpool(self.find, authorization, scope["method"], scope["path"])
            except GraftworkError as error:
                return await JSONResponse({"error": str(error)}, error.status)(scope, receive, send)
            if caller is None:
                refusal = JSONResponse({"error": NEEDED}, 401, {"WWW-Authenticate": CHALLENGE})
                return await refusal(scope, receive, send)
            scope.setdefault("state", {})["caller"] = caller
            with acting(caller.owner):
                return await self.app(scope, receive, send)
        await self.app(scope, receive, send)

    def find(self, authorization: str, method: str, path: str) -> Operator | None:
        """Return whose header this is; None when it does not allow the path.

        Raises `Forbidden` for a suspended tenant's, and `ServiceError` when the catalog cannot be read.
        """
        scheme, _, credential = authorization.partition(" ")
        if scheme.lower() == "basic" and method in SAFE_METHODS:
            credential = _password(credential)
        elif scheme.lower() != "bearer":
            return None
        credential = credential.strip()
        if same(credential, self.own):
            return Operator("controller", is_admin=False)
        if same(credential, self.events):
            return Operator("events", is_admin=False) if path.startswith(EVENTS) else None
        key = self.catalog.keys.find(credential)
        roles = ("admin", "metrics") if path == METRICS else ("admin",)
        if key is None or not key.may(*roles):
            return None
        self.catalog.keys.tenant(key.owner).refuse_suspended()
        return Operator(key.owner, key.may("admin"))


def _password(credential: str) -> str:
    try:
        return base64.b64decode(credential, validate=True).decode().partition(":")[2]
    except (Error, UnicodeDecodeError):
        return ""


def _admin(request: Request) -> Operator:
    caller: Operator = request.state.caller
    if not caller.is_admin:
        raise Unauthorized(NEEDED)
    return caller


# The caller of a route that changes something; and how many rows a caller may ask for.
Admin = Annotated[Operator, Depends(_admin)]
Limit = Annotated[int, Query(ge=1, le=10_000)]


async def whole_body(request: Request, most: int = SMALL_BODY) -> bytes:
    """Return a request's body; `ConfigError` when it is over `most` bytes."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ConfigError(f"The body has more than {most} bytes. Send less.")
    return body
