"""Opening the catalog, and what guards it: leases, keys and switches.

Knows how a SQLite connection must be set up and how one transaction is made. A key's plaintext is
returned once, by `create_key`; only its sha256 is stored.
"""

import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select, create_engine, event, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from engine.adapters import catalog_schema as schema
from engine.adapters.catalog_schema import SCHEMA_VERSION, Key, Lease
from engine.errors import ConfigError, Conflict, NotFound, ServiceError

BUSY_TIMEOUT_MS = 15_000
SCOPES = ("admin", "user", "score")
Row = TypeVar("Row")


def sqlite_path(url: str) -> Path:
    """Return the file of a SQLite URL; `ConfigError` for any other database."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise ConfigError(f"The catalog's address must be sqlite:///FILE, not {parsed.render_as_string()}.")
    return Path(parsed.database)


def open_engine(url: str) -> Engine:
    """Return an engine whose transactions begin when SQLAlchemy's do.

    Writers take SQLite's write lock at once (BEGIN IMMEDIATE): two of them queue up instead of
    failing when they both try to upgrade a read lock. A commit is on disk (synchronous=FULL).
    """
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


class Access:
    """One open catalog: its connections, and its leases, keys and switches."""

    def __init__(self, url: str):
        self.path = sqlite_path(url)
        if not self.path.is_file():
            raise NotFound(f"There is no catalog at {self.path}. Start the services with `graftwork up`.")
        self._engine = open_engine(url)
        self._writer = self._engine.execution_options(write=True)
        self._watch = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._check_schema()

    def close(self) -> None:
        self._watch.close()
        self._engine.dispose()

    def data_version(self) -> int:
        """Return a number that changes when another connection commits. For one thread at a time."""
        return int(self._watch.execute("PRAGMA data_version").fetchone()[0])

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """One transaction; `ServiceError` when the disk is full or the lock is not to be had."""
        try:
            with self._writer.begin() as connection:
                yield connection
        except OperationalError as error:
            raise ServiceError(f"The catalog {self.path} cannot be written: {error.orig}.") from error

    def _check_schema(self) -> None:
        query = "SELECT version_num FROM alembic_version"
        try:
            row = self._watch.execute(query).fetchone()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{self.path} is not a catalog of Graftwork: {error}.") from None
        found = row[0] if row else "none"
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"The catalog {self.path} has schema {found}, this code wants {SCHEMA_VERSION}. "
                "Start the services once with the newer of the two installations."
            )

    # Leases

    def acquire(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take the lease if it is free, expired or ours; return its fence, which only grows."""
        with self._write() as connection:
            now = time.time()
            row = connection.execute(select(schema.leases).where(schema.leases.c.name == name)).one_or_none()
            if row and row.until > now and row.holder != holder:
                return None
            lease = Lease(name, holder, now + ttl_s, row.fence + 1 if row else 1)
            connection.execute(insert(schema.leases).prefix_with("OR REPLACE").values(**vars(lease)))
        return lease.fence

    def renew(self, name: str, holder: str, fence: int, ttl_s: float) -> bool:
        """Prolong a lease; False when another holder has taken it since."""
        table = schema.leases.c
        change = update(schema.leases).values(until=time.time() + ttl_s)
        mine = (table.name == name) & (table.holder == holder) & (table.fence == fence)
        with self._write() as connection:
            return connection.execute(change.where(mine)).rowcount == 1

    def release_lease(self, name: str, holder: str) -> None:
        table = schema.leases.c
        free = update(schema.leases).values(until=0.0)
        with self._write() as connection:
            connection.execute(free.where(table.name == name, table.holder == holder))

    def lease(self, name: str) -> Lease | None:
        return self._one(Lease, select(schema.leases).where(schema.leases.c.name == name))

    # Keys

    def create_key(self, owner: str, scope: str) -> str:
        """Return a new key's plaintext; `ConfigError` for an unknown scope."""
        if scope not in SCOPES:
            raise ConfigError(f"A key's scope is one of {', '.join(SCOPES)}, not {scope!r}.")
        plaintext = f"gw-{secrets.token_hex(20)}"
        key = Key(hash_key(plaintext), owner, scope, time.time())
        with self._write() as connection:
            connection.execute(insert(schema.keys).values(**vars(key)))
        return plaintext

    def keys(self) -> list[Key]:
        with self._engine.connect() as connection:
            rows = connection.execute(select(schema.keys).order_by(schema.keys.c.created_at))
            return [Key(**row._mapping) for row in rows]

    def key(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext."""
        table = schema.keys.c
        query = select(schema.keys).where(table.hash == hash_key(plaintext), table.revoked_at.is_(None))
        return self._one(Key, query)

    def revoke_key(self, prefix: str) -> Key:
        """Revoke the one key whose hash begins with `prefix` (or whose plaintext it is)."""
        wanted = hash_key(prefix) if prefix.startswith("gw-") else prefix
        found = [key for key in self.keys() if key.hash.startswith(wanted) and key.revoked_at is None]
        if not found:
            raise NotFound(f"No key in force begins with {prefix[:12]!r}. `graftwork key ls` lists them.")
        if len(found) > 1:
            raise Conflict(f"{len(found)} keys begin with {prefix!r}; give more of its characters.")
        table = schema.keys.c
        with self._write() as connection:
            change = update(schema.keys).where(table.hash == found[0].hash)
            connection.execute(change.values(revoked_at=time.time()))
        return found[0]

    # Switches

    def switch(self, name: str) -> bool:
        query = select(schema.switches.c.on).where(schema.switches.c.name == name)
        with self._engine.connect() as connection:
            return bool(connection.execute(query).scalar())

    def set_switch(self, name: str, on: bool) -> None:
        row = insert(schema.switches).prefix_with("OR REPLACE").values(name=name, on=on)
        with self._write() as connection:
            connection.execute(row)

    def _one(self, kind: type[Row], query: Select[Any]) -> Row | None:
        with self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        return kind(**row._mapping) if row else None


def hash_key(plaintext: str) -> str:
    return hashlib.sha256(plaintext.encode()).hexdigest()


def ensure_local_key(catalog: Access, path: Path) -> str:
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
