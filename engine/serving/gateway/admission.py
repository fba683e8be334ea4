"""Who may call what: the key of a request, its roles, its purpose, and what an endpoint takes."""

import logging
import time
from collections.abc import Mapping, Sequence

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.catalog.keys import OURS, TINKERS
from engine.errors import Forbidden
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.route_table import GENERATING, OF_TOKENS, Endpoint, find_route
from engine.serving.gateway.routing import Router
from engine.settings.releases import SEGMENT_NAME

# The roles that allow a purpose: one is enough.
PURPOSES = {
    "user": ("infer",),
    "score": ("score",),
    "probe": ("score",),
    "rollout": ("score", "train"),
}
# A session's name is hashed, and hashes of the last ones are kept.
MOST_SESSION = 512
# Seconds between two lines on requests without a valid key.
SAYS_S = 10.0
NO_KEYS = Counter("graftwork_requests_without_key", "Requests refused for want of a valid key.")
log = logging.getLogger("graftwork.admission")
# A key may also be written as Tinker's SDK wants it.
KEY_LENGTHS = (len(OURS) + 40, len(TINKERS) + 40)


def authenticate(router: Router, headers: Mapping[str, str]) -> tuple[Key, Tenant] | None:
    """Return the request's key, of `Authorization: Bearer` or Anthropic's `x-api-key`, and its tenant.

    None when it has none or an invalid one. Raises `Forbidden` while the tenant is suspended.
    """
    scheme, _, plaintext = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        plaintext = headers.get("x-api-key", "")
    key = router.key(plaintext) if len(plaintext) in KEY_LENGTHS else None
    if key is None:
        return None
    tenant = router.tenant(key.owner)
    tenant.refuse_suspended()
    return key, tenant


def served(path: str, method: str) -> Endpoint:
    """Return the endpoint of a path. Raises `Refused`: 404 without one, 405 for another method."""
    found = find_route(path)
    if found is None:
        raise Refused(404, f"{path[:200]} is not served. Use {' or '.join(GENERATING)}.", "unknown_url")
    if method not in found.methods:
        allowed = ", ".join(sorted(found.methods))
        raise Refused(
            405,
            f"{path[:200]} does not take {method}. Use {allowed}.",
            headers=[(b"allow", allowed.encode())],
        )
    return found


def require(what: str, roles: Sequence[str], key: Key) -> None:
    """Raise `Forbidden` unless the key has one of these roles."""
    if not key.may(*roles):
        needed = " or ".join(map(repr, roles))
        raise Forbidden(
            f"{what} requires a key with the role {needed}; this key's are {', '.join(key.roles)}."
        )


class FailedKeys:
    """Counts requests without a valid key, and logs them with a rate: they may be many."""

    def __init__(self) -> None:
        self._count, self._said_at = 0, -SAYS_S

    def note(self, client: str) -> None:
        """Take one more, from this address."""
        NO_KEYS.inc()
        self._count += 1
        now = time.monotonic()
        if now - self._said_at >= SAYS_S:
            log.warning("%d requests had no valid key, the last one from %s.", self._count, client)
            self._count, self._said_at = 0, now


def session_of(headers: Mapping[str, str]) -> str | None:
    """Return the session that a request names, or None. Raises `Refused` (400) for a long one."""
    session = headers.get("x-session-id")
    if session is not None and len(session) > MOST_SESSION:
        raise Refused(400, f"x-session-id must have at most {MOST_SESSION} characters.")
    return session


def purpose_of(path: str, headers: Mapping[str, str], key: Key) -> str:
    """Return the request's purpose. Raises `Refused` for an unknown one, `Forbidden` without its role.

    Without the header it is `rollout` for the paths of rollouts and samples, else `user`.
    """
    purpose = headers.get("x-graftwork-purpose", "rollout" if path in OF_TOKENS else "user")
    roles = PURPOSES.get(purpose)
    if roles is None:
        known = ", ".join(sorted(PURPOSES))
        raise Refused(400, f"x-graftwork-purpose must be one of {known}, not {purpose[:100]!r}.")
    require(f"x-graftwork-purpose {purpose!r}", roles, key)
    return purpose


def segment_of(headers: Mapping[str, str]) -> str | None:
    """Return the segment that a request names, or None. Raises `Refused` for an invalid one."""
    segment = headers.get("x-graftwork-segment")
    if segment is not None and not SEGMENT_NAME.fullmatch(segment):
        raise Refused(
            400,
            f"x-graftwork-segment must be 1 to 64 letters, digits, '.', '-' or '_', not {segment[:64]!r}.",
        )
    return segment
