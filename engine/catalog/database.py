"""The databases of a catalog, SQLite or Postgres: URLs, connection settings, and care of SQLite's file."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from engine.errors import ConfigError

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
