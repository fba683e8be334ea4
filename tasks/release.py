"""What flows and commands need to start a release: the controller's client and the revision to release."""

from engine.clients.controller import ControllerClient
from engine.errors import NotFound
from engine.settings.params import Params
from tasks.outcome import local_key


def controller(params: Params) -> ControllerClient:
    """Return a client of the installation's controller with the local admin key."""
    return ControllerClient(params.url("controller"), local_key(params))


def newest_revision(params: Params, policy: str) -> str:
    """Return the digest of a policy's newest exported revision; `NotFound` when there is none."""
    from engine.catalog.catalog import open_catalog

    with open_catalog(params.paths) as catalog:
        newest = catalog.listing.newest_exported(policy)
    if newest is None:
        raise NotFound(f"Policy {policy!r} has no exported revision yet. Adapt it first.")
    return newest.digest
