"""Copies of a whole catalog: as of one moment into a SQLite file, or by its rows into the other database.

A copy appears whole or not at all. No engine serves it, and nobody holds a lease in it.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import Connection, Table, inspect, literal, select, text, update
from sqlalchemy.exc import DatabaseError

from engine.catalog import tables
from engine.catalog.access import Access, database, open_engine, schema_fault, sqlite_path
from engine.catalog.catalog import upgrade
from engine.catalog.records import SCHEMA_VERSION
from engine.errors import ConfigError, Conflict, ServiceError
from engine.files import replacing

# Rows read and written at a time.
PAGE = 5_000
# How long a SQLite database may stay locked before its copy is given up.
LOCKED_S = 60.0
# Of a new catalog only these have rows: its schema's version, its id and its secret.
OF_NEW = {"alembic_version", "catalog"}
# Engines that serve a catalog; none serves a copy.
RUNNING = ("replicas", "replica_loads")
OnRows = Callable[[str, int], object]


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a SQLite database as of one moment, while others write to it. The copy is a new file.

    Raises `ServiceError` when the database stays locked, or cannot be read.
    """
    deadline = time.monotonic() + LOCKED_S

    def give_up(status: int, _remaining: int, _total: int) -> None:
        if status != sqlite3.SQLITE_DONE and time.monotonic() > deadline:
            raise ServiceError(f"{source} was locked for {LOCKED_S:g} s. Nothing was copied; try again.")

    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            # All pages in one step: of several steps each write of others would start the copy anew.
            old.backup(new, progress=give_up, sleep=0.1)
    except sqlite3.Error as error:
        raise ServiceError(f"{source} cannot be copied: {error}.") from None


def snapshot(url: str, target: Path) -> None:
    """Write a catalog as of one moment into a new SQLite file, whichever database it is in.

    Raises as `copy_sqlite` or `copy_catalog`.
    """
    source = sqlite_path(url)
    if source is None:
        copy_catalog(url, f"sqlite:///{target}", known_alone=True)
        return
    copy_sqlite(source, target)
    with closing(sqlite3.connect(target, isolation_level=None)) as copy:
        copy.execute("UPDATE leases SET until = 0.0")
        for table in RUNNING:
            copy.execute(f"DELETE FROM {table}")


def copy_catalog(
    source: str, target: str, on_rows: OnRows = lambda table, rows: None, known_alone: bool = False
) -> dict[str, int]:
    """Copy a catalog's rows into an empty database; return their number by table.

    `on_rows` is called with a table and how many of its rows are there. The source is read as of one moment,
    so others may go on writing to it. The target is written in one transaction: after a crash it is as empty
    as before. Of a newer schema the copy has what this version knows, if `known_alone` allows that.

    Raises `Conflict` when the target holds a catalog, `NotFound` or `ConfigError` when the source holds none
    of this version, `ServiceError` when a database does not answer or is full.
    """
    file = sqlite_path(target)
    with closing(Access(source)) as old:
        if old.schema > SCHEMA_VERSION and not known_alone:
            raise ConfigError(schema_fault(old.label, old.schema))
        if file is None:
            return _fill(old, target, on_rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            require_empty(target)
            for leftover in file.parent.glob(f"{file.name}.*"):
                leftover.unlink()
            with replacing(file, durable=True) as draft:
                return _fill(old, f"sqlite:///{draft}", on_rows)


def require_empty(target: str) -> None:
    """Raise `Conflict` unless `copy_catalog` could fill this database now."""
    file = sqlite_path(target)
    if file is not None:
        if file.exists():
            raise _taken(target)
        return
    engine = open_engine(target)
    try:
        with _database_faults("a backup", target), engine.connect() as connection:
            _refuse_used(connection, target)
    finally:
        engine.dispose()


def _fill(old: Access, target: str, on_rows: OnRows) -> dict[str, int]:
    engine = open_engine(target)
    try:
        with (
            old.read(old.moment) as source,
            _database_faults(old.label, target),
            engine.execution_options(write=True).begin() as connection,
        ):
            _refuse_used(connection, target)
            upgrade(connection)
            connection.execute(tables.catalog.delete())
            counts = {
                table.name: _copy_rows(source, connection, table, on_rows)
                for table in tables.metadata.sorted_tables
                if table.name not in RUNNING
            }
            connection.execute(update(tables.leases).values(until=0.0))
            return counts
    finally:
        engine.dispose()


def _copy_rows(source: Connection, target: Connection, table: Table, on_rows: OnRows) -> int:
    done = 0
    query = select(table).order_by(*table.primary_key)
    for page in source.execute(query, execution_options={"yield_per": PAGE}).mappings().partitions():
        target.execute(table.insert(), [dict(row) for row in page])
        done += len(page)
        on_rows(table.name, done)
    numbered = table.autoincrement_column
    if numbered is not None and target.dialect.name == "postgresql":
        # Else the next row would get a number that is taken.
        newest = f'SELECT max("{numbered.name}") FROM "{table.name}"'
        sequence = f"pg_get_serial_sequence('{table.name}', '{numbered.name}')"
        target.execute(text(f"SELECT setval({sequence}, coalesce(({newest}), 1), ({newest}) IS NOT NULL)"))
    return done


def _refuse_used(connection: Connection, target: str) -> None:
    """Raise `Conflict` unless the database is empty, or holds a catalog in which nothing has happened."""
    for name in set(inspect(connection).get_table_names()) - OF_NEW:
        table: Any = tables.metadata.tables.get(name)
        if table is None or connection.execute(select(literal(1)).select_from(table).limit(1)).first():
            raise _taken(target)


def _taken(target: str) -> Conflict:
    return Conflict(
        f"{database(target).render_as_string()} is not empty: a catalog is copied into an empty database "
        "alone. Nothing was changed. Name another one, or remove what it holds."
    )


@contextmanager
def _database_faults(source: str, target: str) -> Iterator[None]:
    try:
        yield
    except DatabaseError as error:
        raise ServiceError(
            f"The rows of {source} could not be copied to {database(target).render_as_string()}: "
            f"{error.orig}. Nothing was changed there."
        ) from error
