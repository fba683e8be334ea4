"""The change feed that gateways follow: routes, tombstones, releases, revisions, keys.

Every write to one of these records the policy's name in its own transaction.
"""

from sqlalchemy import Connection, delete, func, select

from engine.catalog import tables
from engine.catalog.access import CatalogPart

# Changes kept; a gateway that is further behind reads everything again.
CHANGES = 10_000


class Changes(CatalogPart):
    """The catalog's change feed; `catalog.changes`."""

    def since(self, seen: int) -> tuple[int, set[str | None] | None]:
        """Return the newest change's number, and the policies changed after the number `seen`.

        A name of None stands for the keys. None in place of the names: more changes than are kept, so that
        any policy may have changed.
        """
        # Most commits change nothing that gateways route by, such as the heartbeats of engines.
        if seen and self._access.quick("SELECT max(id) FROM changes", ()) == [(seen,)]:
            return seen, set()
        table = tables.changes.c
        with self._access.read(self._access.moment) as connection:
            oldest, newest = connection.execute(select(func.min(table.id), func.max(table.id))).one()
            if newest is None:
                return 0, set() if seen == 0 else None
            if seen + 1 < oldest or seen > newest:
                return newest, None
            policies = select(table.policy).where(table.id > seen).distinct()
            return newest, set(connection.execute(policies).scalars())


def tell(connection: Connection, *policies: str | None) -> None:
    """Record in a write transaction that these policies have changed; None stands for the keys."""
    changes = tables.changes
    connection.execute(changes.insert(), [{"policy": policy} for policy in policies])
    newest = select(func.max(changes.c.id)).scalar_subquery()
    connection.execute(delete(changes).where(changes.c.id <= newest - CHANGES))
