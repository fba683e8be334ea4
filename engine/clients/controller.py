"""The controller's HTTP client: policies, releases, decisions, switches and purges.

Every call is idempotent, so it is safe to retry.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from engine.clients.http_client import ServiceClient
from engine.errors import NotFound, ServiceError

POLL_S = 0.25
PATIENCE_S = 20.0
Row = dict[str, Any]


class ControllerClient(ServiceClient):
    """Call the controller at `url` with a `key` of scope `admin`.

    Raises `NotFound`, `Conflict`, `ConfigError` or `ServiceError` with the controller's message.
    """

    def __init__(self, url: str, key: str = "", timeout_s: float = 10.0, patience_s: float = PATIENCE_S):
        super().__init__("controller", url, key, timeout_s, patience_s)

    def start_release(
        self,
        policy: str,
        digest: str,
        settings: Row | None = None,
        skip_gates: dict[str, str] | None = None,
        by: str | None = None,
        replaces: bool = False,
    ) -> Row:
        """Start a release, or return the running one of the same revision; return its row.

        `skip_gates` maps a gate to skip (`score`, `shadow` or `canary`) to the reason. It `replaces` another
        running release of the policy, which ends as `hold`; else that one is a `Conflict`.
        """
        given = {"settings": settings or {}, "skip_gates": skip_gates or {}, "replaces": replaces}
        return self._post("/releases", policy=policy, digest=digest, by=by, **given)

    def release(self, release_id: str) -> Row:
        """Return a release's row and the evidence collected so far."""
        return self._ask("GET", f"/releases/{release_id}")

    def running_release(self, policy: str) -> Row:
        """Return the policy's running release. Raises `NotFound` when none is running."""
        for release in self._ask_list("GET", "/releases", params={"policy": policy}):
            if release["state"] == "running":
                return dict(release)
        raise NotFound(f"No release of {policy!r} is running.")

    def wait_for_verdict(
        self, release_id: str, timeout_s: float, on_update: Callable[[Row], object] = lambda release: None
    ) -> Row:
        """Wait until a release has ended and return its row; `on_update` receives the row at every poll.

        Raises `ServiceError` after `timeout_s`, which begins again after a pause; the release continues.
        """
        return self.wait_for(release_id, timeout_s, "verdict", lambda release: False, on_update)

    def wait_for(
        self,
        release_id: str,
        timeout_s: float,
        what: str,
        is_there: Callable[[Row], bool],
        on_update: Callable[[Row], object] = lambda release: None,
    ) -> Row:
        """Wait as `wait_for_verdict` does, at most until `is_there` says so of the row."""
        deadline = time.monotonic() + timeout_s
        while True:
            release = self.release(release_id)
            on_update(release)
            if release["state"] != "running" or is_there(release):
                return release
            if release["paused"]:
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"Release {release_id} has no {what} after {timeout_s:g} s and is still running. "
                    "Wait longer, or put it on hold."
                )
            time.sleep(POLL_S)

    def approve(self, release_id: str, reason: str, by: str | None = None) -> Row:
        """Approve a release that waits for approval; return its row."""
        return self._post(f"/releases/{release_id}/approve", reason=reason, by=by)

    def hold(self, release_id: str, reason: str, by: str | None = None) -> Row:
        """End a running release and keep the champion; return its row."""
        return self._post(f"/releases/{release_id}/hold", reason=reason, by=by)

    def decide_running(self, action: str, policy: str, reason: str, by: str | None = None) -> Row:
        """Approve, hold, pause or resume the policy's running release; return its row.

        Raises `NotFound` when none is running.
        """
        release = self.running_release(policy)["id"]
        return self._post(f"/releases/{release}/{action}", reason=reason, by=by)

    def decide(self, action: str, reason: str, by: str | None = None, **revision: str | None) -> Row:
        """Promote, restore, rollback or lift a revision (`policy`, `digest`), or freeze or thaw all releases.

        A digest of None restores the route's `previous`. Returns the route, the tombstone, or nothing.
        """
        return self._post(f"/{action}", **revision, reason=reason, by=by)

    def recheck(self, policy: str, by: str | None = None) -> Row:
        """Have a policy's champion judged again by the scores that are there; return `state` and `reason`."""
        return self._post("/recheck", policy=policy, by=by)

    def add_policy(self, name: str, base: str, config: Row, owner: str = "local") -> Row:
        """Create a policy, or update its config for the same owner; return it with its route."""
        return self._post("/policies", name=name, base=base, config=config, owner=owner)

    def record_probe(self, policy: str, digest: str, result: Row) -> None:
        """Store the result of a revision's effect probe; a failed probe also writes a tombstone."""
        self._post("/probes", policy=policy, digest=digest, result=result)

    def purge(self, policy: str, place: str, by: str) -> dict[str, int]:
        """Delete a policy's rows in `place`; return the number of deleted rows by table.

        `place` is `name`, `catalog` or `ledger`: the controller is the only writer of each.
        """
        return self._post("/purge", policy=policy, place=place, by=by)

    def erase(self, tenant: str, by: str) -> dict[str, int]:
        """Delete a tenant's requests and ratings from the ledger; return the number of deleted rows."""
        return self._post("/erase", tenant=tenant, by=by)

    def deliver(self, name: str, events: bytes) -> None:
        """Hand over a spool file (JSON lines) under its name; it is on the controller's disk afterwards."""
        self._ask("POST", f"/events/{name}", content=events)

    def publish_ledger(self) -> None:
        """Write the ledger's snapshot with everything that is spooled."""
        self._post("/ledger")

    def alarms(self) -> list[str]:
        """Return the controller's alarms; an empty list when it does not answer, or refuses the key."""
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            return [str(alarm) for alarm in self.http.get("/status").json()["alarms"]]
        return []

    def waits(self) -> dict[str, list[Row]]:
        """Return what each running release waits for, by its id; nothing where `alarms` returns nothing."""
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            running = self.http.get("/releases", params={"running": True}).json()
            return {release["id"]: release["waits"] for release in running}
        return {}

    def _post(self, path: str, **body: Any) -> Row:
        return self._ask("POST", path, json=body)
