"""One open database of a catalog, SQLite or Postgres: its connections, its transactions, and how rows go in.

Every part of `Catalog` is given the same one.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from engine.catalog import database as databases
from engine.catalog.records import SCHEMA_VERSION
from engine.errors import ConfigError, NotFound, ServiceError

# A server that made somebody wait for so long in vain is not asked again for so many times as long: a gateway
# asks on the loop that all its streams run on.
SILENT_S, SILENT_TIMES, SILENT_MOST_S = 0.5, 5.0, 15.0
Row = TypeVar("Row")


class _Silence(threading.local):
    until = 0.0
    said = ""


class Access:
    """One open database: its connections, its transactions and its dialect. Thread-safe.

    `single` is for one query outside of a transaction, `moment` for several that must see the same rows.
    """

    def __init__(self, url: str):
        address = databases.database(url)
        self.label = str(address.database if databases.sqlite_path(url) else address.render_as_string())
        self.is_sqlite = address.get_backend_name() == "sqlite"
        # Until when a thread does not wait for a server that has told it nothing, and what it says instead.
        self._silent = _Silence()
        if self.is_sqlite and not Path(self.label).is_file():
            raise NotFound(f"There is no catalog at {self.label}. Start the services with `graftwork up`.")
        self.engine = databases.open_engine(url)
        self.single = self.engine.execution_options(single=True)
        self._writer = self.engine.execution_options(write=True)
        # Several queries of one transaction see one moment: always so in SQLite.
        self.moment = (
            self.engine
            if self.is_sqlite
            else self.engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self._dialect: Any = sqlite if self.is_sqlite else postgresql
        self.mark = "?" if self.is_sqlite else "%s"
        self.watch = (
            sqlite3.connect(self.label, isolation_level=None, check_same_thread=False)
            if self.is_sqlite
            else None
        )
        self._check_schema()

    def close(self) -> None:
        if self.watch:
            self.watch.close()
        self.engine.dispose()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction; `ServiceError` when the disk is full or the lock is not to be had."""
        try:
            with self._writer.begin() as connection:
                yield connection
        except OperationalError as error:
            raise ServiceError(f"The catalog {self.label} cannot be written: {error.orig}.") from error

    @contextmanager
    def read(self, engine: Engine | None = None) -> Iterator[Connection]:
        """One connection for queries; `ServiceError` when the database does not answer, or not in time."""
        began = self._refuse_while_silent()
        try:
            with (engine or self.engine).connect() as connection:
                yield connection
        except (DatabaseError, PoolTimeout) as error:
            self._note_silence(error, began)
            cause = getattr(error, "orig", error)
            raise ServiceError(f"The catalog {self.label} cannot be read: {cause}.") from error

    def quick(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of one query in the driver's own words, with a third of SQLAlchemy's time.

        For what a cold name asks of a gateway.
        """
        drivers: Any = self.engine.dialect.loaded_dbapi
        began = self._refuse_while_silent()
        try:
            with closing(self.single.raw_connection()) as connection:
                try:
                    cursor = connection.cursor()
                    cursor.execute(query, values)
                    return list(cursor.fetchall())
                except Exception:
                    # A server's connection that failed once is not used again, whatever the fault.
                    connection.invalidate()
                    raise
        except (drivers.DatabaseError, DatabaseError, PoolTimeout) as error:
            self._note_silence(error, began)
            cause = getattr(error, "orig", error)
            raise ServiceError(f"The catalog {self.label} cannot be read: {cause}.") from error

    def data_version(self, watch: sqlite3.Connection) -> int:
        """Return a number that changes with every commit of another connection to the file."""
        try:
            return int(watch.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.DatabaseError as error:
            raise ServiceError(f"The catalog {self.label} cannot be read: {error}.") from error

    def _refuse_while_silent(self) -> float:
        """Raise `ServiceError` while a server is taken to be silent; return the time."""
        now = time.monotonic()
        if now < self._silent.until:
            raise ServiceError(self._silent.said)
        return now

    def _note_silence(self, error: Exception, began: float) -> None:
        took_s = time.monotonic() - began
        # Without a statement nobody could connect. What failed while it was computed, as by its limit, says
        # nothing of the server.
        connects = isinstance(error, OperationalError) and error.statement is None
        if connects and took_s >= SILENT_S and not self.is_sqlite:
            self._silent.until = time.monotonic() + min(SILENT_MOST_S, SILENT_TIMES * took_s)
            self._silent.said = (
                f"The catalog {self.label} did not answer within {took_s:.1f} s. It is asked again soon."
            )

    def _check_schema(self) -> None:
        query = "SELECT version_num FROM alembic_version"
        try:
            if self.watch:
                row = self.watch.execute(query).fetchone()
            else:
                with self.single.connect() as connection:
                    row = connection.exec_driver_sql(query).first()
        except OperationalError as error:
            raise ServiceError(f"The catalog {self.label} cannot be read: {error.orig}.") from error
        except (sqlite3.DatabaseError, DatabaseError) as error:
            raise ConfigError(f"{self.label} is not a catalog of Graftwork: {error}.") from None
        found = row[0] if row else "none"
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"The catalog {self.label} has schema {found}, this code wants {SCHEMA_VERSION}. "
                "Start the services once with the newer of the two installations."
            )

    # Rows

    def insert(self, table: Table) -> Any:
        """Return an insert of this database's dialect."""
        return self._dialect.insert(table)

    def new(self, table: Table, row: Any) -> Any:
        """Return an insert that leaves a known row as it is."""
        return self.insert(table).values(**vars(row)).on_conflict_do_nothing()

    def put(self, table: Table, row: Any) -> Any:
        """Return an insert that replaces the row with the same key."""
        key = [column.name for column in table.primary_key]
        values = vars(row)
        changed = {name: value for name, value in values.items() if name not in key}
        return self.insert(table).values(**values).on_conflict_do_update(index_elements=key, set_=changed)

    def one(self, kind: type[Row], query: Select[Any]) -> Row | None:
        """Return the one row of a query as this dataclass; None when there is none."""
        with self.read() as connection:
            row = connection.execute(query).one_or_none()
        return kind(**row._mapping) if row else None

    def all(self, kind: type[Row], query: Select[Any]) -> list[Row]:
        """Return the rows of a query as this dataclass."""
        with self.read() as connection:
            return [kind(**row._mapping) for row in connection.execute(query)]
