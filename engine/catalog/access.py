"""One open database of a catalog, SQLite or Postgres: settings, connections, transactions and row helpers.

All parts of a `Catalog` share one.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, ExceptionContext, Select, Table, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from engine.catalog.records import OLDEST_SCHEMA, SCHEMA_VERSION
from engine.errors import ConfigError, NotFound, ServiceError
from engine.version import UPGRADE_FIRST

BUSY_TIMEOUT_MS = 15_000
STATEMENT_TIMEOUT_MS = 120_000
# A machine that is frozen within a transaction holds the writers' lock so long, and no longer: its kernel, or
# nobody, answers the server. Shorter than others wait for the lock.
IDLE_TIMEOUT_MS = 10_000
# For a Postgres server that does not answer: seconds until connecting fails (2 is the least), milliseconds
# until unacknowledged bytes fail, and seconds of silence before a keepalive.
PATIENCE = {
    "connect_timeout": 2,
    "tcp_user_timeout": 5000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    # Of several servers the one that takes writes; after a failover the old one takes none.
    "target_session_attrs": "read-write",
}
CACHE_KIB = 64 << 10
# Random digests touch a page each, so checkpoints are larger than by default. During 10^6 inserts the log
# grows to some 150 MB, 2% of the bytes of so many small adapters.
CHECKPOINT_PAGES = 16_000
# Seconds to wait for others before the log is left as it is.
LOG_S = 0.2
# The advisory lock that makes writers of one Postgres database take turns, as SQLite's do.
WRITE_LOCK = 0x67726166
# Back-off: after a failed connection that took SILENT_S or longer nobody connects for as long again, at most
# SILENT_MOST_S: who asks meanwhile is told at once.
SILENT_S, SILENT_MOST_S = 0.5, 3.0
# A server that takes no writes is an `InternalError`; what breaks a constraint or is no SQL is the caller's.
WRITE_ERRORS = (OperationalError, InternalError, InterfaceError, PoolTimeout)
Row = TypeVar("Row")
Values = Mapping[str, Any] | None
# Records a change within its transaction: an action, on what, and the values before and after.
Record = Callable[[Connection, str, str, Values, Values], None]


@dataclass(frozen=True)
class Actor:
    """Who changes something: the credential's owner, and the name that the caller gave besides."""

    credential: str
    on_behalf_of: str | None = None


ACTING: ContextVar[Actor | None] = ContextVar("acting", default=None)


@contextmanager
def acting(credential: str, on_behalf_of: str | None = None) -> Iterator[None]:
    """Have changes of this block, in this thread or task, be made by a credential's owner."""
    token = ACTING.set(Actor(credential, on_behalf_of))
    try:
        yield
    finally:
        ACTING.reset(token)


def unrecorded(connection: Connection, action: str, subject: str, before: Values, after: Values) -> None:
    """Record nothing of a change."""


def schema_of(row: Sequence[str] | None) -> tuple[str, str]:
    """Return a catalog's schema by its row of `alembic_version`, and the oldest whose code may use it.

    Before 0016 no row says that: only code of the same schema does.
    """
    version, *since = row or ("none",)
    return version, since[0] if since else version


def is_usable(version: str, since: str) -> bool:
    """Say whether this code may use a catalog of a schema that may be used since another one."""
    return since <= SCHEMA_VERSION <= version


def schema_fault(label: str, version: str) -> str:
    """Return what is wrong with a catalog of another schema than this code's, and what to do."""
    sentence = f"The catalog {label} has schema {version}, this code needs {SCHEMA_VERSION}."
    if version > SCHEMA_VERSION:
        return (
            f"{sentence} A newer version of Graftwork shares it: upgrade this installation. What runs "
            "already goes on; nothing was changed."
        )
    if version < OLDEST_SCHEMA:
        return f"{sentence} {UPGRADE_FIRST}"
    return f"{sentence} Run `graftwork migrate` once, or start the controller of this version, which does it."


class Access:
    """One open database: connections, transactions and dialect. Thread-safe.

    `single` runs one query outside of a transaction, `moment` several on the same snapshot. Each change
    that people answer for is given to `record`.
    """

    def __init__(self, url: str, record: Record = unrecorded):
        self.record = record
        address = database(url)
        self.label = str(address.database if sqlite_path(url) else address.render_as_string())
        self.is_sqlite = address.get_backend_name() == "sqlite"
        # The back-off: until when, and the error to raise meanwhile.
        self._silent = 0.0, ""
        if self.is_sqlite and not Path(self.label).is_file():
            raise NotFound(f"There is no catalog at {self.label}. Start the services with `graftwork up`.")
        self.engine = open_engine(url)
        self.single = self.engine.execution_options(single=True)
        self._writer = self.engine.execution_options(write=True)
        # Queries of one transaction see one snapshot: always so in SQLite.
        self.moment = self.engine
        if not self.is_sqlite:
            self.moment = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._dialect: Any = sqlite if self.is_sqlite else postgresql
        self.mark = "?" if self.is_sqlite else "%s"
        options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
        self._reader = sqlite3.connect(self.label, **options) if self.is_sqlite else None
        self._reading = threading.Lock()
        # What ends first when this does, such as a gateway's watch on commits.
        self.ending = ExitStack()
        self.schema = self._checked_schema()

    def close(self) -> None:
        """Close all connections."""
        self.ending.close()
        if self._reader:
            self._reader.close()
        self.engine.dispose()

    @contextmanager
    def write(self, is_alone: bool = True) -> Iterator[Connection]:
        """Open a write transaction. Writers take turns, but for one whose rows no other process writes.

        Raises `ServiceError` when the disk is full, the lock is not free in time or the server only reads.
        """
        try:
            with (self._writer if is_alone else self.engine).begin() as connection:
                yield connection
        except WRITE_ERRORS as error:
            cause = getattr(error, "orig", error)
            raise ServiceError(f"The catalog {self.label} cannot be written: {cause}.") from error

    @contextmanager
    def read(self, engine: Engine | None = None) -> Iterator[Connection]:
        """Open a connection for queries; `ServiceError` when the database does not answer in time."""
        began = self._refuse_while_silent()
        try:
            with (engine or self.engine).connect() as connection:
                yield connection
        except (DatabaseError, InterfaceError, PoolTimeout) as error:
            # An error without a statement is a failed connection.
            self._note_silence(began, isinstance(error, OperationalError) and error.statement is None)
            cause = getattr(error, "orig", error)
            raise ServiceError(f"The catalog {self.label} cannot be read: {cause}.") from error

    def quick(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of one query through the driver itself, in a fifth of SQLAlchemy's time.

        For the queries of a gateway's cold and refused requests. Raises `ServiceError` as `read`.
        """
        if self._reader:
            try:
                # One thread at a time: a connection's statements are shared.
                with self._reading:
                    return self._reader.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                raise ServiceError(f"The catalog {self.label} cannot be read: {error}.") from error
        drivers: Any = self.engine.dialect.loaded_dbapi
        began, is_connected = self._refuse_while_silent(), False
        try:
            with closing(self.single.raw_connection()) as connection:
                is_connected = True
                try:
                    cursor = connection.cursor()
                    cursor.execute(query, values)
                    return list(cursor.fetchall())
                except Exception:
                    # A connection that failed never returns to the pool, whatever the error.
                    connection.invalidate()
                    raise
        except (drivers.Error, DatabaseError, PoolTimeout) as error:
            self._note_silence(began, not is_connected and not isinstance(error, PoolTimeout))
            cause = getattr(error, "orig", error)
            raise ServiceError(f"The catalog {self.label} cannot be read: {cause}.") from error

    def _refuse_while_silent(self) -> float:
        """Raise `ServiceError` during a back-off; return the time."""
        now, (until, fault) = time.monotonic(), self._silent
        if now < until:
            raise ServiceError(fault)
        return now

    def _note_silence(self, began: float, has_no_connection: bool) -> None:
        """Begin a back-off where a connection, and not only a statement, failed by a server's silence."""
        took_s = time.monotonic() - began
        if has_no_connection and took_s >= SILENT_S and not self.is_sqlite:
            fault = f"The catalog {self.label} did not answer within {took_s:.1f} s. It is asked again soon."
            self._silent = time.monotonic() + min(SILENT_MOST_S, took_s), fault

    def _checked_schema(self) -> str:
        query = "SELECT * FROM alembic_version"
        try:
            if self._reader:
                row = self._reader.execute(query).fetchone()
            else:
                with self.single.connect() as connection:
                    row = connection.exec_driver_sql(query).first()
        except OperationalError as error:
            raise ServiceError(f"The catalog {self.label} cannot be read: {error.orig}.") from error
        except (sqlite3.DatabaseError, DatabaseError) as error:
            raise ConfigError(f"{self.label} is not a catalog of Graftwork: {error}.") from None
        version, since = schema_of(row)
        if not is_usable(version, since):
            raise ConfigError(schema_fault(self.label, version))
        return version

    # Rows

    def insert(self, table: Table) -> Any:
        """Return an insert statement of this database's dialect."""
        return self._dialect.insert(table)

    def new(self, table: Table, row: Any) -> Any:
        """Return an insert that ignores a row whose key exists."""
        return self.insert(table).values(**vars(row)).on_conflict_do_nothing()

    def put(self, table: Table, row: Any) -> Any:
        """Return an upsert: it replaces the row with the same key."""
        key = [column.name for column in table.primary_key]
        changed = {name: value for name, value in vars(row).items() if name not in key}
        return self.insert(table).values(**vars(row)).on_conflict_do_update(index_elements=key, set_=changed)

    def change(self, statement: Any) -> int:
        """Execute one statement as a write transaction; return how many rows it has changed."""
        with self.write() as connection:
            return connection.execute(statement).rowcount

    def one(self, kind: type[Row], query: Select[Any]) -> Row | None:
        """Return a query's one row as this dataclass; None when there is none."""
        with self.read() as connection:
            row = connection.execute(query).one_or_none()
        return kind(**row._mapping) if row else None

    def all(self, kind: type[Row], query: Select[Any]) -> list[Row]:
        """Return a query's rows as this dataclass."""
        with self.read() as connection:
            return [kind(**row._mapping) for row in connection.execute(query)]

    def scalar(self, query: Select[Any]) -> Any:
        """Return the first value that a query finds; None when it finds nothing."""
        with self.read() as connection:
            return connection.execute(query).scalar()


class CatalogPart:
    """A part of an open catalog, such as its keys."""

    def __init__(self, access: Access):
        self._access = access


def database(url: str) -> URL:
    """Parse a catalog's URL; `ConfigError` when it names neither SQLite nor Postgres."""
    try:
        address = make_url(url)
    except ArgumentError:
        raise ConfigError(
            f"{url!r} is not a catalog's URL. Write sqlite:///FILE or postgresql://USER@HOST/NAME."
        ) from None
    backend = address.get_backend_name()
    if backend == "postgresql":
        return address.set(drivername="postgresql+psycopg")
    if backend != "sqlite" or not address.database:
        raise ConfigError(
            "The catalog's URL must be sqlite:///FILE or postgresql://USER@HOST/NAME, "
            f"not {address.render_as_string()}."
        )
    return address


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL; None for Postgres."""
    address = database(url)
    return Path(address.database or "") if address.get_backend_name() == "sqlite" else None


def open_engine(url: str) -> Engine:
    """Return an engine whose transactions begin when SQLAlchemy's do and wait for a lock at most 15 s.

    Writers take their lock at once (SQLite: BEGIN IMMEDIATE; Postgres: an advisory lock), so that two of them
    queue up instead of failing when both upgrade a read lock. A commit is durable.
    """
    address = database(url)
    return _open_sqlite(address) if address.get_backend_name() == "sqlite" else _open_postgres(address)


def _open_sqlite(address: URL) -> Engine:
    engine = create_engine(address)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        # A single SELECT is a transaction by itself.
        if not options.get("single", False):
            connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("write", False) else "BEGIN")

    return engine


def _open_postgres(address: URL) -> Engine:
    limits = (
        f"-c lock_timeout={BUSY_TIMEOUT_MS} -c statement_timeout={STATEMENT_TIMEOUT_MS} "
        f"-c idle_in_transaction_session_timeout={IDLE_TIMEOUT_MS} -c tcp_keepalives_idle=5 "
        "-c tcp_keepalives_interval=2 -c tcp_keepalives_count=3 -c tcp_user_timeout=10000"
    )
    try:
        # Ping before each use, for one round trip: after a restart of the server all pooled connections are
        # dead, and each would fail a request.
        given = {name: value for name, value in PATIENCE.items() if name not in address.query}
        engine = create_engine(address, pool_pre_ping=True, connect_args={**given, "options": limits})
        from psycopg.errors import ReadOnlySqlTransaction

        from engine.catalog.postgres_timeouts import TimeoutConnection
    except ModuleNotFoundError:
        raise ConfigError(
            f"The catalog {address.render_as_string()} needs psycopg: pip install 'graftwork[postgres]'."
        ) from None

    @event.listens_for(engine, "do_connect")
    def _on_connect(_dialect: object, _record: object, args: list[Any], options: dict[str, Any]) -> object:
        return TimeoutConnection.connect(*args, **options)

    @event.listens_for(engine, "handle_error")
    def _on_error(context: ExceptionContext) -> None:
        # The server was demoted: no connection to it is of use any more.
        if isinstance(context.original_exception, ReadOnlySqlTransaction):
            context.is_disconnect = True

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        if connection.get_execution_options().get("write", False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})")

    return engine


def read_ahead(path: str) -> None:
    """Read the revisions of a SQLite file into the page cache: a page from the disk takes 0.2 ms.

    Through SQLite, since closing the file in any other way releases the locks that SQLite holds in this
    process.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=LOG_S)) as connection:
        connection.execute("SELECT count(*) FROM revisions NOT INDEXED").fetchone()
        # Without a condition SQLite would scan another index.
        index = "INDEXED BY revisions_key WHERE digest >= x''"
        connection.execute(f"SELECT count(*) FROM revisions {index}").fetchone()


def shorten_log(path: str) -> None:
    """Checkpoint a SQLite log and truncate it, unless another process is using it."""
    # Commits are safe either way: on failure the log is left for the next call.
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(path, timeout=LOG_S, isolation_level=None)) as connection,
    ):
        # PASSIVE blocks nobody, and leaves little for TRUNCATE, which blocks writers.
        for way in ("PASSIVE", "TRUNCATE"):
            connection.execute(f"PRAGMA wal_checkpoint({way})").fetchone()
