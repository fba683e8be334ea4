"""The feed of what has changed of what gateways route by: routes, tombstones, releases, revisions, keys.

Every write of such a thing notes in its own transaction whose policy it was.
"""

import time

from sqlalchemy import Connection, delete, func, select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.errors import ServiceError

# Changes kept for gateways; one that is further behind reads everything again.
CHANGES = 10_000
POLL_S = 0.2


class Changes:
    """The catalog's changes, as gateways follow them; `catalog.changes`."""

    def __init__(self, access: Access):
        self._access = access
        self._watch = access.watch
        # When `version` last asked a server, and what it answered.
        self._looked: tuple[float, int] | None = None
        # When it last did not answer, and why.
        self._failed: tuple[float, str] | None = None

    def version(self) -> int:
        """Return a number that changes when another connection changes what gateways route by.

        Every request may ask: on SQLite that costs microseconds, and it changes with every commit; a
        Postgres server is asked five times a second. For one thread at a time.
        """
        if self._watch:
            return int(self._watch.execute("PRAGMA data_version").fetchone()[0])
        now = time.monotonic()
        if self._failed is not None and now - self._failed[0] < POLL_S:
            raise ServiceError(self._failed[1])
        if self._looked is None or now - self._looked[0] >= POLL_S:
            try:
                with self._access.read(self._access.single) as connection:
                    newest = connection.execute(select(func.max(tables.changes.c.id))).scalar()
            except ServiceError as error:
                # Or each request would wait again for a server that is down.
                self._failed = time.monotonic(), str(error)
                raise
            self._looked, self._failed = (now, int(newest or 0)), None
        return self._looked[1]

    def age(self) -> float:
        """Return how many seconds ago the catalog itself said what `version` last returned."""
        return 0.0 if self._looked is None else time.monotonic() - self._looked[0]

    def since(self, seen: int) -> tuple[int, set[str | None] | None]:
        """Return the newest change's number, and of which policies something changed after the one `seen`.

        That is what gateways route by: routes, stones, releases, revisions that are gone. A name of
        None: the keys. None for the names: more changes than are kept, so anything may have.
        """
        table = tables.changes.c
        with self._access.read(self._access.moment) as connection:
            oldest, newest = connection.execute(select(func.min(table.id), func.max(table.id))).one()
            if newest is None:
                return 0, set() if seen == 0 else None
            if seen + 1 < oldest or seen > newest:
                return newest, None
            found = select(table.policy).where(table.id > seen).distinct()
            return newest, set(connection.execute(found).scalars())


def tell(connection: Connection, *policies: str | None) -> None:
    """Note in a write transaction that what gateways know of policies has changed; None: the keys."""
    changes = tables.changes
    connection.execute(changes.insert(), [{"policy": policy} for policy in policies])
    newest = select(func.max(changes.c.id)).scalar_subquery()
    connection.execute(delete(changes).where(changes.c.id <= newest - CHANGES))
