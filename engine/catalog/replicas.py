"""The engines that serve this catalog, by their own word: heartbeats, and what they have loaded."""

import time
from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy import Delete, delete, select, update

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.records import Replica, ReplicaLoad

# Of a policy's revision under release: None when it is loaded, else why it is not.
Loads = Mapping[tuple[str, str], str | None]


class Replicas(CatalogPart):
    """The catalog's engines; `catalog.replicas`."""

    def join(self, replica: Replica) -> None:
        """Enter an engine that has started, in the place of an earlier one with its id."""
        with self._access.write() as connection:
            connection.execute(self._access.put(tables.replicas, replace(replica, at=time.time())))
            connection.execute(_loads_of(replica.id))

    def beat(self, replica: Replica, loads: Loads) -> bool:
        """Record that an engine lives, and what it has loaded; False when another has taken its id."""
        table = tables.replicas.c
        mine = (table.id == replica.id) & (table.incarnation == replica.incarnation)
        change = update(tables.replicas).where(mine)
        values = {"beats": table.beats + 1, "at": time.time(), "draining": replica.draining}
        with self._access.write() as connection:
            if connection.execute(change.values(**values)).rowcount == 0:
                return False
            query = select(tables.replica_loads).where(tables.replica_loads.c.replica == replica.id)
            known = {(row.policy, row.digest): row.fault for row in connection.execute(query)}
            if known != dict(loads):
                connection.execute(_loads_of(replica.id))
                rows = [
                    vars(ReplicaLoad(replica.id, policy, digest, fault))
                    for (policy, digest), fault in loads.items()
                ]
                if rows:
                    connection.execute(tables.replica_loads.insert(), rows)
        return True

    def leave(self, replica: Replica) -> None:
        """Remove an engine that stops, unless another has taken its id."""
        table = tables.replicas.c
        mine = (table.id == replica.id) & (table.incarnation == replica.incarnation)
        with self._access.write() as connection:
            if connection.execute(delete(tables.replicas).where(mine)).rowcount:
                connection.execute(_loads_of(replica.id))

    def forget(self, before: float) -> int:
        """Remove engines that were last heard of before a time (epoch seconds); return how many.

        One that lives after all joins again at its next beat.
        """
        table = tables.replicas.c
        with self._access.write() as connection:
            old = connection.execute(select(table.id).where(table.at < before)).scalars().all()
            connection.execute(delete(tables.replicas).where(table.id.in_(old)))
            loads = tables.replica_loads
            connection.execute(delete(loads).where(loads.c.replica.in_(old)))
        return len(old)

    def find(self, id: str) -> Replica | None:
        """Return an engine, alive or not; None when there is none with this id."""
        return self._access.one(Replica, select(tables.replicas).where(tables.replicas.c.id == id))

    def all(self) -> list[Replica]:
        """Return every engine that has not left, alive or not, by id."""
        return self._access.all(Replica, select(tables.replicas).order_by(tables.replicas.c.id))

    def loads(self, policy: str, digest: str) -> dict[str, str | None]:
        """Return what came of the loads of a revision, by replica: None, or why it failed."""
        table = tables.replica_loads.c
        query = select(tables.replica_loads).where(table.policy == policy, table.digest == digest)
        return {load.replica: load.fault for load in self._access.all(ReplicaLoad, query)}


def _loads_of(replica: str) -> Delete:
    return delete(tables.replica_loads).where(tables.replica_loads.c.replica == replica)
