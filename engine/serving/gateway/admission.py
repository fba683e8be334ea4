"""The first stage: who calls what. It checks the key and its roles, and gives the call its id."""

import logging
import time
from collections.abc import Mapping, Sequence

from engine.catalog.catalog import Key, Tenant
from engine.catalog.records import OURS, TINKERS
from engine.errors import Forbidden, Unauthorized
from engine.logs import REQUEST
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.call import Call, id_for
from engine.serving.gateway.route_table import GENERATING, NOWHERE, Endpoint
from engine.serving.gateway.routing import Router

# Seconds between two lines on requests without a valid key.
SAYS_S = 10.0
log = logging.getLogger("graftwork.admission")
# A key may also be written as Tinker's SDK wants it.
KEY_LENGTHS = (len(OURS) + 40, len(TINKERS) + 40)
# The headers that the gateway reads.
READ = {b"authorization", b"x-api-key", b"x-graftwork-purpose", b"x-graftwork-segment", b"x-session-id"}


class NoKey(Unauthorized):
    """The request has no valid key. There may be many, so its answer is made ahead."""


async def admit(call: Call) -> None:
    """Take the call's key, tenant and id.

    Raises `NoKey`, `Forbidden` for a suspended tenant or a key without the role, `LimitReached` where no
    request of this minute is left, and `Refused` for another method.
    """
    state = call.state
    call.headers = headers = {
        name.decode(): value.decode("latin-1") for name, value in call.scope["headers"] if name in READ
    }
    call.looked_at = time.perf_counter()
    key, call.tenant = await state.router.ask(authenticate, state.router, headers)
    call.key = key
    call.scope["state"]["graftwork_key"] = key
    state.meter.refuse_spent(call)
    if call.endpoint is NOWHERE:
        raise refuse_path(call.scope["path"])
    refuse_method(call.endpoint, call.scope["path"], call.scope["method"])
    require(call.endpoint.path, call.endpoint.roles, key)
    call.id = id_for(key, call.id, state.router.hash_once)
    REQUEST.set(call.id)


def authenticate(router: Router, headers: Mapping[str, str]) -> tuple[Key, Tenant]:
    """Return the request's key, of `Authorization: Bearer` or Anthropic's `x-api-key`, and its tenant.

    Raises `NoKey` when it has none or an invalid one, `Forbidden` while the tenant is suspended.
    """
    scheme, _, plaintext = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        plaintext = headers.get("x-api-key", "")
    key = router.key(plaintext) if len(plaintext) in KEY_LENGTHS else None
    if key is None:
        raise NoKey
    tenant = router.tenant(key.owner)
    tenant.refuse_suspended()
    return key, tenant


def refuse_path(path: str) -> Refused:
    """Return the error for a path that is not served."""
    return Refused(404, f"{path[:200]} is not served. Use {' or '.join(GENERATING)}.", "unknown_url")


def refuse_method(endpoint: Endpoint, path: str, method: str) -> None:
    """Raise `Refused` (405) for a method that the endpoint does not take."""
    if method not in endpoint.methods:
        allowed = ", ".join(sorted(endpoint.methods))
        raise Refused(
            405,
            f"{path[:200]} does not take {method}. Use {allowed}.",
            headers=[(b"allow", allowed.encode())],
        )


def require(what: str, roles: Sequence[str], key: Key) -> None:
    """Raise `Forbidden` unless the key has one of these roles."""
    if not key.may(*roles):
        needed = " or ".join(map(repr, roles))
        raise Forbidden(
            f"{what} requires a key with the role {needed}; this key's are {', '.join(key.roles)}."
        )


class FailedKeys:
    """Logs requests without a valid key with a rate: they may be many."""

    def __init__(self) -> None:
        self._count, self._said_at = 0, -SAYS_S

    def note(self, client: str) -> None:
        """Take one more, from this address."""
        self._count += 1
        now = time.monotonic()
        if now - self._said_at >= SAYS_S:
            log.warning("%d requests had no valid key, the last one from %s.", self._count, client)
            self._count, self._said_at = 0, now
