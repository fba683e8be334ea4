"""The change feed that gateways follow: routes, tombstones, releases, revisions, keys.

Every write to one of these records the policy's name in its own transaction.
"""

import sqlite3
import time

from sqlalchemy import Connection, delete, func, select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.errors import ServiceError

# Changes kept; a gateway that is further behind reads everything again.
CHANGES = 10_000
POLL_S = 0.2


class Changes:
    """The catalog's change feed; `catalog.changes`."""

    def __init__(self, access: Access):
        self._access = access
        self._watch = access.watch
        # When `version` last queried a server, and the answer.
        self._looked: tuple[float, int] | None = None
        # When such a query last failed, and the error.
        self._failed: tuple[float, str] | None = None

    def version(self) -> int:
        """Return a number that changes when another connection changes what gateways route by.

        Cheap enough for every request: SQLite takes microseconds, and its number changes with every commit; a
        Postgres server is queried five times a second. For one thread at a time.
        """
        if self._watch:
            try:
                # Changes with every commit of another connection to the file.
                return int(self._watch.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.DatabaseError as error:
                raise ServiceError(f"The catalog {self._access.label} cannot be read: {error}.") from error
        now = time.monotonic()
        if self._failed is not None and now - self._failed[0] < POLL_S:
            raise ServiceError(self._failed[1])
        if self._looked is None or now - self._looked[0] >= POLL_S:
            try:
                with self._access.read(self._access.single) as connection:
                    newest = connection.execute(select(func.max(tables.changes.c.id))).scalar()
            except ServiceError as error:
                # Otherwise each request would wait for a server that is down.
                self._failed = time.monotonic(), str(error)
                raise
            self._looked, self._failed = (now, int(newest or 0)), None
        return self._looked[1]

    def age(self) -> float:
        """Return how old the answer that `version` last returned is, in seconds; 0 in SQLite."""
        return 0.0 if self._looked is None else time.monotonic() - self._looked[0]

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
