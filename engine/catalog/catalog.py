"""The catalog: durable index of bases, policies, revisions, routes and releases.

Safe for several processes at once: every change is one transaction; routes and releases change by
compare-and-swap.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

from filelock import FileLock
from sqlalchemy import Column, extract, func, select
from sqlalchemy.exc import OperationalError

from engine.catalog import tables
from engine.catalog.access import (
    Access,
    Record,
    open_engine,
    read_ahead,
    shorten_log,
    sqlite_path,
    unrecorded,
)
from engine.catalog.bases import Bases
from engine.catalog.changes import Changes
from engine.catalog.controller_state import Aliases, Notices, Switches
from engine.catalog.expiry import Lifecycle
from engine.catalog.keys import Keys
from engine.catalog.leases import Leases
from engine.catalog.listing import Listing
from engine.catalog.migration import upgrade
from engine.catalog.places import Layouts, Places
from engine.catalog.policy_rows import Policies
from engine.catalog.purges import Purges
from engine.catalog.records import (
    AliasNote,
    Base,
    Key,
    Lease,
    Notice,
    Policy,
    Release,
    Replica,
    Revision,
    Route,
    Tenant,
    Tombstone,
)
from engine.catalog.release_rows import Releases
from engine.catalog.replicas import Replicas
from engine.catalog.revision_rows import RevisionRows
from engine.catalog.revisions import Revisions
from engine.catalog.routes import Routes
from engine.catalog.tinker import TinkerIndex
from engine.catalog.unknown_names import UnknownNames
from engine.catalog.withheld import Quarantine, Tombstones
from engine.errors import ConfigError, NotFound, ServiceError
from engine.settings.params import Paths

__all__ = [
    "AliasNote",
    "Base",
    "Catalog",
    "Key",
    "Lease",
    "Notice",
    "Policy",
    "Release",
    "Replica",
    "Revision",
    "Route",
    "Tenant",
    "Tombstone",
    "migrate",
]


def migrate(url: str, even_shared: bool = True) -> None:
    """Create the catalog or migrate it to the newest schema; safe in several processes at once.

    One in Postgres, which other versions may share, is only created unless `even_shared`. Raises
    `ServiceError` when its disk is full or read-only, or the database does not answer.
    """
    try:
        _migrate(url, even_shared)
    except (OSError, OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.orig
        raise ServiceError(
            f"The catalog {sqlite_path(url) or 'in Postgres'} cannot be opened for writing: {reason}. "
            "Check that it answers, is writable and has room on its disk. Nothing was changed."
        ) from None


def _migrate(url: str, even_shared: bool) -> None:
    path = sqlite_path(url)
    if path is None:
        _upgrade(url, even_shared)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        engine = open_engine(url)
        with engine.connect() as connection:
            # The journal mode belongs to the file and cannot change inside a transaction.
            connection.connection.cursor().execute("PRAGMA journal_mode=WAL")
        engine.dispose()
        _upgrade(url)


def _upgrade(url: str, migrates: bool = True) -> None:
    engine = open_engine(url)
    with engine.execution_options(write=True).begin() as connection:
        upgrade(connection, migrates)
    engine.dispose()


def text_digests(paths: Paths, base_digest: str) -> list[str]:
    """Return the text digests that a base had here, the one in force last; none where none is known yet.

    That is so without a catalog, too, and in one of a version before 0014.
    """
    with suppress(NotFound, ConfigError), Catalog(paths.catalog_url) as catalog:
        return catalog.bases.get(base_digest).text_digests
    return []


class Catalog:
    """One open catalog and its parts, all over one database; a context manager that closes it.

    Thread-safe; open one in each process. Raises `NotFound` when there is no database at `url`, and
    `ConfigError` when it is not a catalog, or one of another schema. Each change that people answer for is
    given to `record`; `unknown` makes the errors for names that are not there.
    """

    def __init__(self, url: str, record: Record = unrecorded, unknown: type[UnknownNames] = UnknownNames):
        self.access = access = Access(url, record)
        self.label = access.label
        rows = RevisionRows(access)
        names = unknown(access)
        # Bases, policies and revisions.
        self.bases = Bases(access)
        self.policies = Policies(access, names)
        self.revisions = Revisions(access, rows, names)
        self.listing = Listing(access, rows)
        # Their bytes in the store.
        self.places = Places(access, rows)
        self.layouts = Layouts(access)
        self.quarantine = Quarantine(access)
        # Serving.
        self.routes = Routes(access)
        self.releases = Releases(access)
        self.tombstones = Tombstones(access)
        self.changes = Changes(access)
        self.replicas = Replicas(access)
        # Retirement, expiry and removal.
        self.lifecycle = Lifecycle(access, rows)
        self.purges = Purges(access)
        # Access, and the controller's own state.
        self.keys = Keys(access)
        self.leases = Leases(access)
        self.switches = Switches(access)
        self.aliases = Aliases(access)
        self.notices = Notices(access)
        self.tinker = TinkerIndex(access)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def id(self) -> str:
        """Return the catalog's own id, by which a store names its owner."""
        return self._own(tables.catalog.c.id)

    @cached_property
    def secret(self) -> bytes:
        """The installation's secret, with which gateways hash units and ids."""
        return self._own(tables.catalog.c.secret).encode()

    def _own(self, column: Column[str]) -> str:
        # A catalog without this row is damaged, and has no secret that may be made up.
        with self.access.read() as connection:
            return connection.execute(select(column)).scalar_one()

    @property
    def is_file(self) -> bool:
        """Say whether the database is a local file, so that a query takes no network."""
        return self.access.is_sqlite

    def server_time(self) -> float | None:
        """Return the database server's clock (epoch seconds); None where the database is a file."""
        if self.is_file:
            return None
        return float(self.access.scalar(select(extract("epoch", func.clock_timestamp()))))

    def read_ahead(self) -> None:
        """Load the revisions into the page cache, where the database is a file."""
        if self.is_file:
            read_ahead(self.label)

    def note(self, action: str, subject: str, values: Mapping[str, Any]) -> None:
        """Have a change outside of the catalog recorded as its own are."""
        with self.access.write() as connection:
            self.access.record(connection, action, subject, None, values)

    def shorten_log(self) -> None:
        """Checkpoint and truncate the write-ahead log, where the database is a file."""
        if self.is_file:
            shorten_log(self.label)

    def close(self) -> None:
        """Close all connections."""
        self.access.close()
