"""What guards the catalog: leases, keys and switches.

A key's plaintext is returned once, by `create_key`; only its sha256 is stored.
"""

import hashlib
import os
import secrets
import time
from pathlib import Path

from sqlalchemy import select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import Key, Lease
from engine.errors import ConfigError, Conflict, NotFound

SCOPES = ("admin", "user", "score")
# How far the clocks of machines may be apart that share a catalog, and leases longer than the asker's.
SKEW_S = 600.0


class Guards(Access):
    """The catalog's leases, keys and switches; part of `Catalog`."""

    # Leases

    def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take the lease if it is free, expired or ours; return its fence, which only grows."""
        with self._write() as connection:
            now = time.time()
            row = connection.execute(select(tables.leases).where(tables.leases.c.name == name)).one_or_none()
            # One that ends later than any could that was taken now is of a clock that was put back since.
            if row and now < row.until <= now + ttl_s + SKEW_S and row.holder != holder:
                return None
            lease = Lease(name, holder, now + ttl_s, row.fence + 1 if row else 1)
            connection.execute(self._put(tables.leases, lease))
        return lease.fence

    def renew(self, name: str, holder: str, fence: int, ttl_s: float) -> bool:
        """Prolong a lease; False when another holder has taken it since."""
        table = tables.leases.c
        change = update(tables.leases).values(until=time.time() + ttl_s)
        mine = (table.name == name) & (table.holder == holder) & (table.fence == fence)
        with self._write() as connection:
            return connection.execute(change.where(mine)).rowcount == 1

    def release_lease(self, name: str, holder: str) -> None:
        table = tables.leases.c
        free = update(tables.leases).values(until=0.0)
        with self._write() as connection:
            connection.execute(free.where(table.name == name, table.holder == holder))

    def lease(self, name: str) -> Lease | None:
        return self._one(Lease, select(tables.leases).where(tables.leases.c.name == name))

    # Keys

    def create_key(self, owner: str, scope: str) -> str:
        """Return a new key's plaintext; `ConfigError` for an unknown scope."""
        if scope not in SCOPES:
            raise ConfigError(f"A key's scope is one of {', '.join(SCOPES)}, not {scope!r}.")
        plaintext = f"gw-{secrets.token_hex(20)}"
        key = Key(hash_key(plaintext), owner, scope, time.time())
        with self._write() as connection:
            connection.execute(self._new(tables.keys, key))
            self._tell(connection, None)
        return plaintext

    def keys(self) -> list[Key]:
        with self._read() as connection:
            rows = connection.execute(select(tables.keys).order_by(tables.keys.c.created_at))
            return [Key(**row._mapping) for row in rows]

    def key(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext."""
        table = tables.keys.c
        query = select(tables.keys).where(table.hash == hash_key(plaintext), table.revoked_at.is_(None))
        return self._one(Key, query)

    def revoke_key(self, prefix: str) -> Key:
        """Revoke the one key whose hash begins with `prefix` (or whose plaintext it is)."""
        wanted = hash_key(prefix) if prefix.startswith("gw-") else prefix
        found = [key for key in self.keys() if key.hash.startswith(wanted) and key.revoked_at is None]
        if not found:
            raise NotFound(f"No key in force begins with {prefix[:12]!r}. `graftwork key ls` lists them.")
        if len(found) > 1:
            raise Conflict(f"{len(found)} keys begin with {prefix!r}; give more of its characters.")
        table = tables.keys.c
        with self._write() as connection:
            change = update(tables.keys).where(table.hash == found[0].hash)
            connection.execute(change.values(revoked_at=time.time()))
            self._tell(connection, None)
        return found[0]

    # Switches

    def switch(self, name: str) -> bool:
        query = select(tables.switches.c.on).where(tables.switches.c.name == name)
        with self._read() as connection:
            return bool(connection.execute(query).scalar())

    def set_switch(self, name: str, on: bool) -> None:
        row = self._insert(tables.switches).values(name=name, on=on)
        with self._write() as connection:
            connection.execute(row.on_conflict_do_update(index_elements=["name"], set_={"on": on}))


def hash_key(plaintext: str) -> str:
    return hashlib.sha256(plaintext.encode()).hexdigest()


def ensure_local_key(catalog: Guards, path: Path) -> str:
    """Return the installation's own admin key, kept in `path` for its owner only.

    A key that was revoked, or belongs to a catalog that is gone, is replaced.
    """
    if path.is_file():
        plaintext = path.read_text().strip()
        if catalog.key(plaintext):
            return plaintext
    plaintext = catalog.create_key("local", "admin")
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_text(plaintext + "\n")
    temporary.rename(path)
    return plaintext
