"""The ledger: every figure of every revision, in one DuckDB file.

Events get from the spool into tables exactly once; readers open a snapshot, which never blocks the writer.
Tables and views are in `migrations/*.sql`. DuckDB allows one writing process: the controller.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import duckdb

from engine.errors import ConfigError, Conflict, NotFound
from engine.files import sync
from engine.ledger.copies import LedgerCopy, LedgerFile
from engine.ledger.spool import FINITE, REJECTED, Spool, infinite, read_lines, ready_files
from engine.version import UPGRADE_FIRST

__all__ = ["Ledger", "Spool", "open_snapshot"]

MIGRATIONS = Path(__file__).parent / "migrations"
FILES_A_COMMIT = 64
# Tables that say something of answers, and the column with the answer's id.
OF_ANSWERS = {
    "feedback": "request_id", "metrics": "request_id", "evaluations": "request", "shadows": "request"
}  # fmt: skip
# Only the beginning of a copy checkpoints: another one would change the file under the copy.
NO_CHECKPOINT = "SET checkpoint_threshold = '1000TB'"
NAMED = re.compile(rb'"policy": ?"([^"]+)"')
# Returns which of these policies were purged: their rows must not come back.
Gone = Callable[[Collection[str]], set[str]]
# Numbers the files that this process has opened as ledgers.
OPENED = itertools.count()
Events = dict[str, dict[str, dict[str, Any]]]  # table -> id -> event
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "VARCHAR": (str,),
    "DOUBLE": (int, float),
    "INTEGER": (int,),
    "BIGINT": (int,),
    "JSON": (dict, list, str, int, float),
}


class Ledger:
    """The ledger's one writer, for one thread at a time. `columns` holds the types of each table's columns.

    Raises `Conflict` when another process has the file open, `ConfigError` when the file comes
    from a newer version that did more than add to it.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # How often its rows changed, and how often they had when the readers' copy was begun.
        self._changes, self._copied = 1, 0
        self._open()

    def _open(self) -> None:
        self.connection = _connect(self.path)
        self.connection.execute(NO_CHECKPOINT)
        _migrate(self.connection, self.path)
        self._file = LedgerFile(self.path)
        self.columns = table_columns(self.connection)
        # Rows keep their numbers until the file is opened again, maybe as another one.
        self.number = next(OPENED)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self.connection.close()
        self._file.close()

    def become(self, path: Path) -> None:
        """Continue with another file of the same schema, renamed over this one."""
        self.close()
        path.replace(self.path)
        sync(self.path.parent)
        self._open()
        self.touch()

    def touch(self) -> None:
        """Make the next `snapshot` write a copy even if nothing has changed."""
        self._changes += 1

    def ingest(self, spool_root: Path, gone: Gone = lambda policies: set()) -> int:
        """Insert the events that are ready and return how many were new.

        Events of policies that are `gone` are dropped: an answer that was under way while its policy was
        purged is recorded afterwards. An event whose id is known is ignored; a file is removed after the
        commit. Lines that fit no table, and scores that are not finite, are moved to `rejected/` beside the
        spool's files.
        """
        new = 0
        files = ready_files(spool_root)
        for start in range(0, len(files), FILES_A_COMMIT):
            new += self._ingest_files(files[start : start + FILES_A_COMMIT], spool_root / REJECTED, gone)
        return new

    def sweep(self, before: float) -> int:
        """Remove what was said before this time (epoch seconds) of unknown answers; return how many rows.

        Feedback names no policy, and a score no key: of an answer that is removed they would stay forever.
        """
        removed = 0
        for table, column in OF_ANSWERS.items():
            unknown = f"NOT EXISTS (SELECT 1 FROM observations WHERE observations.id = {column})"
            query = f'DELETE FROM {table} WHERE "at" < ? AND {unknown}'
            row = self.connection.execute(query, [before]).fetchone()
            removed += int(row[0]) if row else 0
        self._changes += removed
        return removed

    def snapshot(self, destination: Path) -> bool:
        """Replace the readers' copy if anything changed since the last one; return whether it did."""
        copy = self.begin_copy(destination)
        if copy is None:
            return False
        copy.write()
        return True

    def begin_copy(self, destination: Path) -> LedgerCopy | None:
        """Return a copy of all that is in the ledger now, to be written on any thread; None if it is there.

        Only one may be written at a time: the next one's beginning makes it fail.
        """
        if self.is_copied(destination):
            return None
        changes = self._changes
        self.connection.execute("CHECKPOINT")
        for leftover in destination.parent.glob(f"{destination.name}.*"):
            # A kill left it, and it may hold rows that are to be gone.
            leftover.unlink(missing_ok=True)

        def written() -> None:
            self._copied = changes

        return LedgerCopy(self._file, destination, written)

    def is_copied(self, destination: Path) -> bool:
        """Return whether the readers' copy holds everything."""
        return self._copied == self._changes and destination.is_file()

    def size(self) -> int:
        """Return the file's size in bytes."""
        return self._file.size()

    def _ingest_files(self, files: list[Path], rejected: Path, gone: Gone) -> int:
        events: Events = {}
        bad: dict[Path, list[bytes]] = {}
        for path in files:
            for line in read_lines(path):
                event = _parse(line, self.columns)
                if isinstance(event, bytes):
                    bad.setdefault(path, []).append(event)
                else:
                    events.setdefault(event.pop("table"), {}).setdefault(event["id"], event)
        _drop_gone(events, bad, gone)
        for path, lines in bad.items():
            _put_aside(path, rejected, lines)
        try:
            self._insert(events)
        except duckdb.ConstraintException:
            events = self._unknown(events)
            self._insert(events)
        for path in files:
            path.unlink(missing_ok=True)
        new = sum(map(len, events.values()))
        self._changes += new
        return new

    def _insert(self, events: Events) -> None:
        """Insert all or nothing, in order of arrival, which INSERT OR IGNORE would not keep."""
        self.connection.begin()
        try:
            for table, rows in events.items():
                query = f"INSERT INTO {table} BY NAME SELECT unnest(from_json(?::JSON, ?), max_depth := 2)"
                shape = json.dumps([self.columns[table]])
                self.connection.execute(query, [json.dumps(list(rows.values())), shape])
            self.connection.commit()
        except duckdb.Error:
            self.connection.rollback()
            raise

    def _unknown(self, events: Events) -> Events:
        unknown: Events = {}
        for table, rows in events.items():
            query = f"SELECT id FROM {table} WHERE id IN (SELECT unnest(?))"
            known = {row[0] for row in self.connection.execute(query, [list(rows)]).fetchall()}
            unknown[table] = {id: row for id, row in rows.items() if id not in known}
        return unknown


def policy_of(line: bytes) -> str | None:
    """Return the policy that a line of the spool names, even if it is torn or fits no table, or None."""
    try:
        event: Any = json.loads(line)
    except ValueError:
        named = NAMED.search(line)
        return named[1].decode(errors="replace") if named else None
    policy = event.get("policy") if isinstance(event, dict) else None
    return policy if isinstance(policy, str) else None


def _drop_gone(events: Events, bad: dict[Path, list[bytes]], gone: Gone) -> None:
    """Remove the events of policies that are gone, and the feedback on their answers."""
    named = {row.get("policy") for rows in events.values() for row in rows.values()}
    named |= {policy_of(line) for lines in bad.values() for line in lines}
    lost = gone([policy for policy in named if policy])
    if not lost:
        return
    answers = {id for id, row in events.get("observations", {}).items() if row.get("policy") in lost}
    for table, rows in events.items():
        events[table] = {
            id: row
            for id, row in rows.items()
            if row.get("policy") not in lost and row.get("request_id") not in answers
        }
    for path, lines in bad.items():
        bad[path] = [line for line in lines if policy_of(line) not in lost]


def _put_aside(path: Path, rejected: Path, lines: list[bytes]) -> None:
    """Write the rejected lines of a spool file, whole at once: another thread may be removing some there."""
    draft = path.with_name(f"{path.name}.{REJECTED}")
    if lines:
        rejected.mkdir(exist_ok=True)
        draft.write_bytes(b"".join(lines))
        draft.replace(rejected / path.name)
    else:
        # A kill may have left it before the policy of its lines was purged.
        draft.unlink(missing_ok=True)


def open_snapshot(path: Path) -> duckdb.DuckDBPyConnection:
    """Open the readers' copy, some seconds old; `NotFound` when there is none."""
    if not path.is_file():
        raise NotFound(f"There is no ledger snapshot at {path} yet. A running controller writes it.")
    return duckdb.connect(str(path), read_only=True)


def open_ledger(path: Path) -> duckdb.DuckDBPyConnection:
    """Open the readers' copy, or an empty ledger while there is none."""
    if path.is_file():
        return open_snapshot(path)
    connection = duckdb.connect()
    _migrate(connection, path)
    return connection


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    try:
        return duckdb.connect(str(path))
    except duckdb.IOException as error:
        holder = re.search(r"held in (?:(\S+) \()?PID (\d+)", str(error))
        if not holder:
            raise
        # In another container's processes nobody looks.
        who = f"process {holder[2]} ({holder[1]})" if holder[1] else "a process of another container"
        raise Conflict(
            f"The ledger {path} is held by {who}. End that process, or read the snapshot beside it instead."
        ) from None


def _migrate(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    connection.execute('CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, "at" DOUBLE)')
    row = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    schema = row[0] if row else 0
    files = {int(file.name[:4]): file for file in MIGRATIONS.glob("*.sql")}
    if schema > max(files):
        # A newer version has written it, after a rollback of this one.
        row = connection.execute("SELECT max(usable_since) FROM migrations").fetchone()
        if row and row[0] is not None and row[0] <= max(files):
            return
        raise ConfigError(
            f"The ledger {path} has schema {schema}, newer than this code's {max(files)}. Upgrade Graftwork."
        )
    if 0 < schema < min(files):
        raise ConfigError(f"The ledger {path} has schema {schema}, older than {min(files)}. {UPGRADE_FIRST}")
    for version in sorted(number for number in files if number > schema):
        connection.begin()
        connection.execute(files[version].read_text())
        connection.execute('INSERT INTO migrations (version, "at") VALUES (?, ?)', [version, time.time()])
        connection.commit()


def table_columns(connection: duckdb.DuckDBPyConnection) -> dict[str, dict[str, str]]:
    """Return the types of each table's columns."""
    query = """
        SELECT table_name, column_name, data_type FROM duckdb_columns()
        WHERE database_name = current_database() AND table_name IN (SELECT table_name FROM duckdb_tables())
        AND NOT internal AND table_name <> 'migrations'
    """
    tables: dict[str, dict[str, str]] = {}
    for table, column, kind in connection.execute(query).fetchall():
        tables.setdefault(table, {})[column] = kind
    return tables


def _parse(line: bytes, tables: dict[str, dict[str, str]]) -> dict[str, Any] | bytes:
    """Return an event that fits its table; of any other line what to put aside.

    NaN and Infinity become null; an event of `FINITE` that has one is put aside, with the reason.
    """
    try:
        event = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        return line
    if not isinstance(event, dict):
        return line
    columns = tables.get(str(event.get("table")))
    if columns is None or event.get("id") is None or event.get("at") is None:
        return line
    for name, value in event.items():
        if name == "table" or value is None:
            continue
        if not isinstance(value, JSON_TYPES.get(columns.get(name, ""), ())):
            return line
    if event["table"] in FINITE and (fault := infinite(json.loads(line))):
        return line.rstrip()[:-1] + f', "{REJECTED}": {json.dumps(fault)}}}\n'.encode()
    return event
