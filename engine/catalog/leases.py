"""Leases: named locks with an expiry, for work that one process does at a time."""

import time

from sqlalchemy import select, update

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.records import Lease

# How far the clocks of machines that share a catalog may differ, and how much longer than the caller's lease
# another may last.
SKEW_S = 600.0
# Held while a backup runs: no segment of the store is removed meanwhile.
BACKUP = "backup"


class Leases(CatalogPart):
    """The catalog's leases; `catalog.leases`."""

    def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take the lease if it is free, expired or ours; return its fencing token (it only grows) or None."""
        with self._access.write() as connection:
            now = time.time()
            row = connection.execute(select(tables.leases).where(tables.leases.c.name == name)).one_or_none()
            # A lease that ends later than one taken now could end was taken before the clock was set back.
            if row and now < row.until <= now + ttl_s + SKEW_S and row.holder != holder:
                return None
            lease = Lease(name, holder, now + ttl_s, row.fence + 1 if row else 1)
            connection.execute(self._access.put(tables.leases, lease))
        return lease.fence

    def renew(self, name: str, holder: str, fence: int, ttl_s: float) -> bool:
        """Extend a lease; False when another holder has taken it since."""
        table = tables.leases.c
        change = update(tables.leases).values(until=time.time() + ttl_s)
        mine = (table.name == name) & (table.holder == holder) & (table.fence == fence)
        return self._access.change(change.where(mine)) == 1

    def release(self, name: str, holder: str) -> None:
        """Release a lease; does nothing when another holds it."""
        table = tables.leases.c
        free = update(tables.leases).values(until=0.0)
        self._access.change(free.where(table.name == name, table.holder == holder))

    def find(self, name: str) -> Lease | None:
        """Return a lease, expired or not; None when it was never taken."""
        return self._access.one(Lease, select(tables.leases).where(tables.leases.c.name == name))

    def is_held(self, name: str) -> bool:
        """Return whether somebody holds a lease now."""
        lease = self.find(name)
        return lease is not None and lease.until > time.time()
