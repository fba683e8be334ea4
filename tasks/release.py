"""Releases, asked of the controller over HTTP.

Knows the controller's calls and its faults. Decides nothing. `url` is the controller's address,
`key` an admin key. Raises `NotFound`, `Conflict`, `ConfigError` or `ServiceError` with the
controller's own sentence.
"""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from engine.errors import ConfigError, Conflict, NotFound, ServiceError
from engine.settings.params import Params

POLL_S = 0.25
TIMEOUT_S = 10.0
RETRY_S = 20.0
STEPS = ("probe", "score", "approval", "canary", "done")
FAULTS: dict[int, type[Exception]] = {400: ConfigError, 401: ConfigError, 404: NotFound, 409: Conflict}


def start_release(
    url: str,
    key: str,
    policy: str,
    digest: str,
    settings: dict[str, Any] | None = None,
    skip_gates: dict[str, str] | None = None,
    by: str | None = None,
) -> dict[str, Any]:
    """Start a release, or find the running one of the same revision; return its row.

    `skip_gates` maps `score` or `canary` to the reason why it is skipped.
    """
    body = {"policy": policy, "digest": digest, "settings": settings or {}, "skip_gates": skip_gates or {}}
    return _call("POST", f"{url}/releases", key, body | {"by": by})


def read_release(url: str, release_id: str) -> dict[str, Any]:
    """Return a release's row with the evidence so far."""
    return _call("GET", f"{url}/releases/{release_id}")


def wait_for_verdict(
    url: str,
    release_id: str,
    timeout_s: float,
    on_update: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Return a release once it has ended; `on_update` gets its row at every look.

    Raises `ServiceError` after `timeout_s`; the release then goes on by itself.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        release = read_release(url, release_id)
        if on_update:
            on_update(release)
        if release["state"] != "running":
            return release
        if time.monotonic() > deadline:
            raise ServiceError(
                f"Release {release_id} has no verdict after {timeout_s:g} s; it goes on. "
                "Ask again, or put it on hold."
            )
        time.sleep(POLL_S)


def wait_for_step(url: str, release_id: str, step: str, timeout_s: float) -> dict[str, Any]:
    """Return a release once it is at `step`, past it, or has ended; `ServiceError` after `timeout_s`."""
    reached = STEPS[STEPS.index(step) :]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        release = read_release(url, release_id)
        if release["state"] != "running" or release["step"] in reached:
            return release
        time.sleep(POLL_S)
    raise ServiceError(
        f"Release {release_id} has not reached {step!r} after {timeout_s:g} s; see the controller's log."
    )


def approve(url: str, key: str, release_id: str, reason: str, by: str | None = None) -> dict[str, Any]:
    """Let a release that waits for approval go to users; return its row."""
    return _call("POST", f"{url}/releases/{release_id}/approve", key, {"reason": reason, "by": by})


def hold(url: str, key: str, release_id: str, reason: str, by: str | None = None) -> dict[str, Any]:
    """End a running release without a change of champion; return its row."""
    return _call("POST", f"{url}/releases/{release_id}/hold", key, {"reason": reason, "by": by})


def hold_policy(url: str, key: str, policy: str, reason: str, by: str | None = None) -> dict[str, Any]:
    """End the policy's running release; `NotFound` when none runs."""
    return hold(url, key, running_release(url, policy)["id"], reason, by)


def running_release(url: str, policy: str) -> dict[str, Any]:
    """Return the policy's running release; `NotFound` when none runs."""
    releases: Any = _call("GET", f"{url}/releases?policy={quote(policy)}")
    for release in releases:
        if release["state"] == "running":
            return dict(release)
    raise NotFound(f"No release of {policy!r} is running.")


def restore(
    url: str, key: str, policy: str, digest: str | None, reason: str, by: str | None = None
) -> dict[str, Any]:
    """Make an earlier revision (None: the route's previous one) champion again; return the route."""
    body = {"policy": policy, "digest": digest, "reason": reason, "by": by}
    return _call("POST", f"{url}/restore", key, body)


def freeze(url: str, key: str, reason: str, by: str | None = None) -> dict[str, Any]:
    """Let no pointer move but rollbacks, until `thaw`."""
    return _call("POST", f"{url}/freeze", key, {"reason": reason, "by": by})


def thaw(url: str, key: str, reason: str, by: str | None = None) -> dict[str, Any]:
    """Let pointers move again."""
    return _call("POST", f"{url}/thaw", key, {"reason": reason, "by": by})


def newest_revision(params: Params, policy: str) -> str:
    """Return the digest of a policy's newest exported revision; `NotFound` when there is none."""
    from engine.catalog.catalog import Catalog

    catalog = Catalog(params.paths.catalog_url)
    try:
        newest = catalog.listing.newest_exported(policy)
    finally:
        catalog.close()
    if newest is None:
        raise NotFound(f"Policy {policy!r} has no exported revision yet. Adapt it first.")
    return newest.digest


def promote(
    url: str, key: str, policy: str, digest: str, reason: str, by: str | None = None
) -> dict[str, Any]:
    """Make a revision the champion by hand; return the route."""
    return _decide("promote", url, key, policy, digest, reason, by)


def rollback(
    url: str, key: str, policy: str, digest: str, reason: str, by: str | None = None
) -> dict[str, Any]:
    """Bury a revision by hand; return the tombstone."""
    return _decide("rollback", url, key, policy, digest, reason, by)


def lift(url: str, key: str, policy: str, digest: str, reason: str, by: str | None = None) -> dict[str, Any]:
    """End a revision's tombstone; return it."""
    return _decide("lift", url, key, policy, digest, reason, by)


def record_probe(url: str, key: str, policy: str, digest: str, result: dict[str, Any]) -> None:
    """Have the result of a revision's effect probe kept, and a refused revision buried."""
    _call("POST", f"{url}/probes", key, {"policy": policy, "digest": digest, "result": result})


def add_policy(
    url: str, key: str, name: str, base: str, config: dict[str, Any], owner: str = "local"
) -> dict[str, Any]:
    """Create a policy, or update the config of one of the same owner; return it with its route."""
    body = {"name": name, "base": base, "config": config, "owner": owner}
    return _call("POST", f"{url}/policies", key, body)


def _decide(
    verb: str, url: str, key: str, policy: str, digest: str, reason: str, by: str | None
) -> dict[str, Any]:
    body = {"policy": policy, "digest": digest, "reason": reason, "by": by}
    return _call("POST", f"{url}/{verb}", key, body)


def _call(
    method: str, url: str, key: str | None = None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Call the controller. Every call may be repeated: a second one finds what the first has done."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    again = Retrying(
        retry=retry_if_exception_type(httpx.TransportError),
        stop=stop_after_delay(RETRY_S),
        wait=wait_exponential(0.1, max=2),
        reraise=True,
    )
    try:
        response = again(httpx.request, method, url, headers=headers, json=body, timeout=TIMEOUT_S)
    except httpx.TransportError as error:
        raise ServiceError(
            f"The controller at {url} does not answer ({error}). Is it up? `graftwork up`."
        ) from None
    if response.is_success:
        answer: dict[str, Any] = response.json()
        return answer
    sentence = _sentence(response)
    raise FAULTS.get(response.status_code, ServiceError)(sentence)


def _sentence(response: httpx.Response) -> str:
    if response.headers.get("content-type", "").startswith("application/json"):
        return str(response.json().get("error", response.text))
    return f"The controller answered {response.status_code}: {response.text[:200]}"
