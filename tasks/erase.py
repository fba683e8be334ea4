"""Erases a tenant: revokes its keys, purges its policies, and removes what its keys asked, rated and used.

Every step is idempotent: after a crash, run it again. The audit log keeps its entries, which name the tenant
and its policies but hold no prompt, answer or user. The usage log keeps its hourly sums, from which its bill
is made, and its budgets' counters, which go after 40 days.
"""

import time
from collections import Counter
from collections.abc import Callable

from engine.catalog.catalog import Catalog
from engine.catalog.opening import open_catalog
from engine.controller.route_changes import controller_serves
from engine.errors import ConfigError, NotFound
from engine.metering.erasure import erase as erase_usage
from engine.settings.params import Params
from tasks.purge import HANDED_OVER_S, long_controller, purge, purge_ledger_here
from tasks.purge_record import Counts

# Every gateway has noticed a revoked key by then.
REVOKED_S = 1.0


def erase(
    params: Params, tenant: str, by: str, reason: str, on_place: Callable[[str, Counts], object]
) -> dict[str, Counts]:
    """Erase a tenant, calling `on_place` after each place; return the counts by place.

    Raises `NotFound` when nothing in the catalog is the tenant's, and what `purge` raises.
    """
    if not by.strip() or not reason.strip():
        raise ConfigError("Give --by (your name) and --reason. Both are recorded.")
    places: dict[str, Counts] = {}

    def done(place: str, counts: Counts) -> None:
        places[place] = dict(Counter(places.get(place, {})) + Counter(counts))

    with open_catalog(params.paths) as catalog:
        keys = [key for key in catalog.keys.all() if key.owner == tenant]
        policies = owned_policies(catalog, tenant)
        if not keys and not policies:
            raise NotFound(
                f"No key and no policy belongs to {tenant!r}. `graftwork key ls` lists the owners."
            )
        in_force = [key for key in keys if key.revoked_at is None]
        for key in in_force:
            catalog.keys.revoke(key.hash)
        done("keys", {"revoked": len(in_force)})
        time.sleep(REVOKED_S + HANDED_OVER_S)
        for policy in policies:
            purge(params, policy, by, reason, done)
        done("policies", {"purged": len(policies)})
        removed, kept = erase_usage(params.paths.usage, tenant)
        catalog.note("usage.erase", tenant, {"by": by, "removed": removed})
        done("usage", removed)
        done("kept", kept)
        done("answers", _answers(params, catalog, tenant, [name for key in keys for name in key.names], by))
    for place, counts in places.items():
        on_place(place, counts)
    return places


def owned_policies(catalog: Catalog, tenant: str) -> list[str]:
    """Return the names of a tenant's policies."""
    names, after = [], ""
    while page := catalog.policies.page(after):
        names += [policy.name for policy in page if policy.owner == tenant]
        after = page[-1].name
    return names


def _answers(params: Params, catalog: Catalog, tenant: str, keys: list[str], by: str) -> Counts:
    """Remove the keys' requests and ratings: through the controller when it runs, else here."""
    from engine.ledger.purge import of_keys

    if controller_serves(catalog):
        with long_controller(params) as client:
            return client.erase(tenant, by)
    removed = purge_ledger_here(params, of_keys(params.paths.ledger, keys))
    catalog.note("tenant.erase", tenant, {"by": by, "removed": removed})
    return removed
