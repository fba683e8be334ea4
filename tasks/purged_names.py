"""A name that was purged, taken again on purpose: the one way past the marker that a purge leaves."""

import time

from engine.errors import Conflict
from engine.settings.params import Params
from tasks.purge_record import is_under_way


def reuse_purged_name(params: Params, name: str, owner: str, reuse: bool) -> None:
    """Raise `Conflict` for a name that was purged; with `reuse` make it a policy without revisions anew.

    `Conflict` also with `reuse` while the purge has not come to its end.
    """
    from engine.base.resident import ensure_base
    from engine.catalog.catalog import Policy, open_catalog

    if not params.paths.has_catalog:
        return
    with open_catalog(params.paths, migrated=True) as catalog:
        mark = catalog.purges.find(name)
        if mark is None or catalog.policies.owners([name]):
            return
        if is_under_way(params, name):
            raise Conflict(
                f"The purge of {name!r} by {mark['by']!r} has not come to its end. Run `graftwork purge "
                f"{name}` again, it goes on from where it was; then give --reuse-name."
            )
        if not reuse:
            raise Conflict(
                f"The name {name!r} was purged by {mark['by']!r}. Choose another name, or give --reuse-name "
                "to use it for something new."
            )
        base = ensure_base(params.base, params.paths).digest
        catalog.policies.add(Policy(name, base, {}, owner, time.time()), again=True)
