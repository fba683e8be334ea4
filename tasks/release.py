"""What flows and commands need to start a release: the controller's client and the revision to release."""

import time
from typing import Any

from engine.clients.controller import ControllerClient
from engine.errors import Conflict, NotFound
from engine.settings.forms import ReleaseForm
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tasks.outcome import local_key

# Beyond the limits of approval and canary, for a release's other gates.
GATES_S = 60.0


def controller(params: Params, **patience: float) -> ControllerClient:
    """Return a client of the installation's controller with the local admin key."""
    return ControllerClient(params.url("controller"), local_key(params), **patience)


def start_release(params: Params, form: ReleaseForm) -> dict[str, Any]:
    """Start the form's release, before or after another one of its policy as the form says; return its row.

    Waits at most as long as the other release may take. Raises `Conflict` where it may not wait, and
    `ServiceError` when others still run by then.
    """
    digest, until = form.digest or newest_revision(params, form.policy), None
    may_wait, replaces = form.if_running == "wait", form.if_running == "replace"
    with controller(params) as client:
        while True:
            if may_wait and (other := other_release(client, form.policy, digest)):
                until = until or time.monotonic() + longest_s(other)
                client.wait_for_verdict(other["id"], until - time.monotonic())
                continue
            try:
                return client.start_release(
                    form.policy, digest, form.settings(), form.skip_gates(), form.by, replaces
                )
            except Conflict:
                # Somebody else who waited may have come first.
                if not may_wait or not other_release(client, form.policy, digest):
                    raise


def other_release(client: ControllerClient, policy: str, digest: str) -> dict[str, Any] | None:
    """Return the policy's running release if it is not of this revision, else None."""
    try:
        running = client.running_release(policy)
    except NotFound:
        return None
    return None if running["revision"].startswith(digest) else running


def longest_s(release: dict[str, Any]) -> float:
    """Return the most seconds from a release's start to its verdict."""
    return ReleaseConfig.stored(release["settings"]).longest_s + GATES_S


def newest_revision(params: Params, policy: str) -> str:
    """Return the digest of a policy's newest exported revision; `NotFound` when there is none."""
    from engine.catalog.opening import open_catalog

    with open_catalog(params.paths) as catalog:
        newest = catalog.listing.newest_exported(policy)
    if newest is None:
        raise NotFound(f"Policy {policy!r} has no exported revision yet. Adapt it first.")
    return newest.digest
