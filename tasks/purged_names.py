"""Reuses a purged policy name on explicit request."""

import time

from engine.base.resident import ensure_base
from engine.errors import Conflict
from engine.settings.params import Params
from tasks.purge_record import is_under_way


def reuse_purged_name(params: Params, name: str, owner: str, reuse: bool) -> None:
    """Raise `Conflict` for a purged name; with `reuse`, create it as a new policy without revisions.

    Raises `Conflict` even with `reuse` while the purge is unfinished.
    """
    from engine.catalog.catalog import Policy
    from engine.catalog.opening import open_catalog

    if not params.paths.has_catalog:
        return
    with open_catalog(params.paths, migrated=True) as catalog:
        mark = catalog.purges.find(name)
        if mark is None or catalog.policies.owners([name]):
            return
        if is_under_way(params, name):
            raise Conflict(
                f"The purge of {name!r} by {mark['by']!r} has not finished. Run `graftwork purge {name}` "
                "again; it continues where it stopped. Then give --reuse-name."
            )
        if not reuse:
            raise Conflict(
                f"The name {name!r} was purged by {mark['by']!r}. Choose another name, or give --reuse-name "
                "to create a new policy under it."
            )
        base = ensure_base(params.base, params.paths).digest
        catalog.policies.add(Policy(name, base, {}, owner, time.time()), again=True)
