"""One open catalog, in SQLite or Postgres: its transactions, and its words.

Knows how rows are read and written in each of the two, and how long words become short ids in rows.
"""

import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Select,
    Table,
    delete,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DatabaseError, OperationalError

from engine.catalog import database as databases
from engine.catalog import tables
from engine.catalog.records import SCHEMA_VERSION, Revision
from engine.catalog.row_codec import BASE, LAYOUT, OWNER, SEGMENT, decode
from engine.errors import ConfigError, NotFound, ServiceError

# Words kept in memory; owners may be many.
WORDS = 200_000
# Changes kept for gateways; one that is further behind reads everything again.
CHANGES = 10_000
POLL_S = 0.2
# A server that made somebody wait for so long in vain is not asked again for so many times as long: a gateway
# asks on the loop that all its streams run on.
SILENT_S, SILENT_TIMES, SILENT_MOST_S = 0.5, 5.0, 15.0
# Words of one query: a statement has a limit.
CHUNK = 1000
Row = TypeVar("Row")


class _Silence(threading.local):
    until = 0.0
    said = ""


class Access:
    """One open catalog: its connections, its transactions, and the words of its rows."""

    def __init__(self, url: str):
        address = databases.database(url)
        self.label = str(address.database if databases.sqlite_path(url) else address.render_as_string())
        self._is_sqlite = address.get_backend_name() == "sqlite"
        # When `data_version` last asked a server, and what it answered.
        self._looked: tuple[float, int] | None = None
        # When it last did not answer, and why.
        self._failed: tuple[float, str] | None = None
        # Until when a thread does not wait for a server that has told it nothing, and what it says instead.
        self._silent = _Silence()
        if self._is_sqlite and not Path(self.label).is_file():
            raise NotFound(f"There is no catalog at {self.label}. Start the services with `graftwork up`.")
        self._engine = databases.open_engine(url)
        self._single = self._engine.execution_options(single=True)
        self._writer = self._engine.execution_options(write=True)
        # Several queries of one transaction see one moment: always so in SQLite.
        self._moment = (
            self._engine
            if self._is_sqlite
            else self._engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self._dialect: Any = sqlite if self._is_sqlite else postgresql
        self._mark = "?" if self._is_sqlite else "%s"
        self._watch = (
            sqlite3.connect(self.label, isolation_level=None, check_same_thread=False)
            if self._is_sqlite
            else None
        )
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._check_schema()

    @property
    def is_file(self) -> bool:
        """Say whether a query takes no network, and so little time."""
        return self._is_sqlite

    def close(self) -> None:
        if self._watch:
            self._watch.close()
        self._engine.dispose()

    def read_ahead(self) -> None:
        """Have revisions in memory before they are asked for, where the database is a file."""
        if self._is_sqlite:
            databases.read_ahead(self.label)

    def shorten_log(self) -> None:
        """Put the log into the database, where it is a file that nobody is busy with."""
        if self._is_sqlite:
            databases.shorten_log(self.label)

    def data_version(self) -> int:
        """Return a number that changes when another connection changes what gateways route by.

        Every request may ask: on SQLite that costs microseconds, and it changes with every commit; a
        Postgres server is asked five times a second. For one thread at a time.
        """
        if self._watch:
            return int(self._watch.execute("PRAGMA data_version").fetchone()[0])
        now = time.monotonic()
        if self._failed is not None and now - self._failed[0] < POLL_S:
            raise ServiceError(self._failed[1])
        if self._looked is None or now - self._looked[0] >= POLL_S:
            try:
                with self._read(self._single) as connection:
                    newest = connection.execute(select(func.max(tables.changes.c.id))).scalar()
            except Exception as error:
                # Or each request would wait again for a server that is down.
                self._failed = time.monotonic(), str(error)
                raise
            self._looked, self._failed = (now, int(newest or 0)), None
        return self._looked[1]

    def data_version_age(self) -> float:
        """Return how many seconds ago the catalog itself said what `data_version` last returned."""
        return 0.0 if self._looked is None else time.monotonic() - self._looked[0]

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """One transaction; `ServiceError` when the disk is full or the lock is not to be had."""
        try:
            with self._writer.begin() as connection:
                yield connection
        except OperationalError as error:
            raise ServiceError(f"The catalog {self.label} cannot be written: {error.orig}.") from error

    @contextmanager
    def _read(self, engine: Engine | None = None) -> Iterator[Connection]:
        """One connection for queries; `ServiceError` when the database does not answer."""
        began = self._refuse_while_silent()
        try:
            with (engine or self._engine).connect() as connection:
                yield connection
        except OperationalError as error:
            self._note_silence(error, began)
            raise ServiceError(f"The catalog {self.label} cannot be read: {error.orig}.") from error

    def _quick(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of one query in the driver's own words, with a third of SQLAlchemy's time.

        For what a cold name asks of a gateway.
        """
        drivers: Any = self._engine.dialect.loaded_dbapi
        began = self._refuse_while_silent()
        try:
            connection = self._single.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute(query, values)
                return list(cursor.fetchall())
            except Exception:
                # A server's connection that failed once is not used again.
                connection.invalidate()
                raise
            finally:
                connection.close()
        except (drivers.OperationalError, OperationalError) as error:
            self._note_silence(error, began)
            cause = getattr(error, "orig", error)
            raise ServiceError(f"The catalog {self.label} cannot be read: {cause}.") from error

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
        if connects and took_s >= SILENT_S and not self._is_sqlite:
            self._silent.until = time.monotonic() + min(SILENT_MOST_S, SILENT_TIMES * took_s)
            self._silent.said = (
                f"The catalog {self.label} did not answer within {took_s:.1f} s. It is asked again soon."
            )

    def _check_schema(self) -> None:
        query = "SELECT version_num FROM alembic_version"
        try:
            if self._watch:
                row = self._watch.execute(query).fetchone()
            else:
                with self._read() as connection:
                    row = connection.exec_driver_sql(query).first()
        except (sqlite3.DatabaseError, DatabaseError) as error:
            raise ConfigError(f"{self.label} is not a catalog of Graftwork: {error}.") from None
        found = row[0] if row else "none"
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"The catalog {self.label} has schema {found}, this code wants {SCHEMA_VERSION}. "
                "Start the services once with the newer of the two installations."
            )

    # Rows

    def _insert(self, table: Table) -> Any:
        return self._dialect.insert(table)

    def _new(self, table: Table, row: Any) -> Any:
        """Return an insert that leaves a known row as it is."""
        return self._insert(table).values(**vars(row)).on_conflict_do_nothing()

    def _put(self, table: Table, row: Any) -> Any:
        """Return an insert that replaces the row with the same key."""
        key = [column.name for column in table.primary_key]
        values = vars(row)
        changed = {name: value for name, value in values.items() if name not in key}
        return self._insert(table).values(**values).on_conflict_do_update(index_elements=key, set_=changed)

    def _one(self, kind: type[Row], query: Select[Any]) -> Row | None:
        with self._read() as connection:
            row = connection.execute(query).one_or_none()
        return kind(**row._mapping) if row else None

    def _all(self, kind: type[Row], query: Select[Any]) -> list[Row]:
        with self._read() as connection:
            return [kind(**row._mapping) for row in connection.execute(query)]

    def _tell(self, connection: Connection, *policies: str | None) -> None:
        """Note in a write transaction that what gateways know of policies has changed; None: the keys."""
        changes = tables.changes
        connection.execute(changes.insert(), [{"policy": policy} for policy in policies])
        newest = select(func.max(changes.c.id)).scalar_subquery()
        connection.execute(delete(changes).where(changes.c.id <= newest - CHANGES))

    # Words

    def _intern(self, wanted: Iterable[str]) -> dict[str, int]:
        """Return the ids of words, adding those that are new. Not within a write transaction."""
        words, known, table = set(wanted), self._ids, tables.names
        ids = {word: known[word] for word in words if word in known}
        missing = [word for word in words if word not in ids]
        if missing:
            with self._write() as connection:
                new = self._insert(table).on_conflict_do_nothing()
                connection.execute(new, [{"name": word} for word in missing])
                found = _named(connection, table.c.name, missing)
            ids |= self._remember(found)
        return ids

    def _words(self, ids: Collection[int]) -> dict[int, str]:
        """Return the words of ids."""
        known, table = self._names, tables.names
        words = {id: known[id] for id in ids if id in known}
        if len(words) < len(ids):
            with self._read() as connection:
                found = _named(connection, table.c.id, [id for id in ids if id not in words])
            self._remember(found)
            words |= {row.id: row.name for row in found}
        return words

    def _revisions(self, rows: Sequence[Any]) -> list[Revision]:
        """Return the revisions of rows whose values are in the order of `COLUMNS`."""
        words = self._words({row[at] for row in rows for at in (BASE, LAYOUT, SEGMENT, OWNER)})
        return [decode(row, words) for row in rows]

    def _remember(self, found: Sequence[Any]) -> dict[str, int]:
        ids = {row.name: row.id for row in found}
        if len(self._names) + len(ids) > WORDS:
            self._ids, self._names = {}, {}
        self._ids |= ids
        self._names |= {row.id: row.name for row in found}
        return ids


def _named(connection: Connection, column: Column[Any], wanted: Sequence[Any]) -> list[Any]:
    """Return the rows of `names` with one of these ids, or words."""
    query = select(tables.names)
    chunks = (wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK))
    return [row for chunk in chunks for row in connection.execute(query.where(column.in_(chunk)))]
