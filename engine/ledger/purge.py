"""Removal of rows from ledger, spool and snapshot, down to their bytes: a policy's, some keys', old ones.

DuckDB marks deleted rows and keeps their bytes (it does not compact tables that have a key), so the rows that
stay are copied into a new file, which is renamed over the old one. Nothing is deleted in the old file: until
the rename it is whole. Rows come from the readers' copy, on any thread and in a DuckDB of its own, whose
faults are not the ledger's; only what is newer comes from the ledger, on the thread that owns it.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb

from engine.files import sync, write_whole
from engine.ledger.ledger import OF_ANSWERS, Ledger, table_columns
from engine.ledger.spool import REJECTED, read_lines

FRESH = ".fresh"
Columns = Mapping[str, Mapping[str, str]]
OF_OLD = 'SELECT id FROM observations WHERE "at" < ?'


class Removal:
    """The removal of rows from the ledger at `path`: `copy` once or more on any thread, then `switch`.

    `where` returns each table's condition, whose every mark stands for `value`. Of rejected lines those go
    that have one of `values` in `field`. A kill at any moment leaves the old file or the new one, whole, and
    the removal can begin anew.
    """

    def __init__(
        self,
        path: Path,
        where: Callable[[Columns], Mapping[str, str]],
        value: Any,
        field: str = "",
        values: Sequence[str] = (),
    ):
        self._path, self._where, self._value = path, where, value
        self.field, self.values = field, values
        self._fresh = path.with_name(f"{path.name}{FRESH}")
        # Of each table: the newest row that was looked at.
        self._until: dict[str, int] = {}

    def copy(self, snapshot: Path) -> None:
        """Copy the rows that stay, and were not copied before, from the readers' copy into the new file.

        The snapshot must be of the file that is the ledger until the switch: rows are told by their numbers.
        """
        begins = not self._until
        if begins:
            self._remove_leftovers()
        # One thread: the others stay the loop's. Large sorts go to the disk beside the file.
        spilled = str(self._spilled())
        with closing(duckdb.connect(config={"threads": 1, "temp_directory": spilled})) as connection:
            connection.execute(f"ATTACH '{_quoted(self._fresh)}' AS fresh")
            connection.execute(f"ATTACH '{_quoted(snapshot)}' AS source (READ_ONLY)")
            if begins:
                create_like_source(connection)
            connection.execute("USE source")
            self._copy_rows(connection)
            connection.execute("CHECKPOINT fresh")
        sync(self._fresh)

    def switch(self, ledger: Ledger) -> dict[str, int]:
        """Copy the rows that are newer, and continue with the new file; return how many went, by table.

        On the thread that owns the ledger.
        """
        connection = ledger.connection
        connection.execute(f"ATTACH '{_quoted(self._fresh)}' AS fresh")
        self._copy_rows(connection)
        removed = {
            table: _count(connection, table) - _count(connection, f"fresh.{table}")
            for table in self._where(ledger.columns)
        }
        connection.execute("CHECKPOINT fresh")
        connection.execute("DETACH fresh")
        # Empty the write-ahead log, which the new file would find beside it.
        connection.execute("CHECKPOINT")
        sync(self._fresh)
        ledger.become(self._fresh)
        return removed

    def _copy_rows(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Copy the rows after those that were looked at, in their order."""
        columns = table_columns(connection)
        where = self._where(columns)
        for table in columns:
            goes, after = where.get(table, "false"), self._until.get(table, -1)
            newest = connection.execute(f"SELECT coalesce(max(rowid), -1) FROM {table}").fetchall()[0][0]
            query = f"SELECT * FROM {table} WHERE rowid > ? AND ({goes}) IS NOT TRUE ORDER BY rowid"
            values = [after, *[self._value] * goes.count("?")]
            connection.execute(f"INSERT INTO fresh.{table} BY NAME {query}", values)
            self._until[table] = max(after, newest)

    def _remove_leftovers(self) -> None:
        """Remove what a kill left of an earlier removal."""
        for leftover in (self._fresh, self._fresh.with_name(f"{self._fresh.name}.wal")):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(self._spilled(), ignore_errors=True)

    def _spilled(self) -> Path:
        return self._fresh.with_name(f"{self._fresh.name}.tmp")


def create_like_source(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables in the new file, after a rollback also those that a newer version has added."""
    connection.execute("COPY FROM DATABASE source TO fresh (SCHEMA)")
    connection.execute("INSERT INTO fresh.migrations FROM source.migrations")


def of_policy(ledger: Path, policy: str) -> Removal:
    """Return the removal of a policy's events, and of what was said of its observations."""

    def where(columns: Columns) -> dict[str, str]:
        tables = sorted(table for table, names in columns.items() if "policy" in names)
        said = of_answers("SELECT id FROM observations WHERE policy = ?")
        return said | dict.fromkeys(tables, "policy = ?")

    return Removal(ledger, where, policy, "policy", [policy])


def of_keys(ledger: Path, keys: Sequence[str]) -> Removal:
    """Return the removal of what was asked and rated by these keys (ids or hashes)."""
    asked = "list_contains(?, key)"
    # A shadow's answers to their questions were asked for by a key of the installation.
    shadowed = f"SELECT answer FROM shadows WHERE {asked}"
    said = of_answers(f"SELECT id FROM observations WHERE {asked}")
    own = {table: f"{asked} OR {said[table]}" for table in ("feedback", "metrics", "shadows")}
    scores = f"{said['evaluations']} OR request IN ({shadowed})"
    where = {**said, **own, "evaluations": scores, "observations": f"{asked} OR id IN ({shadowed})"}
    return Removal(ledger, lambda _: where, list(keys), "key", keys)


def of_old(ledger: Ledger, before: float) -> Removal | None:
    """Return the removal of observations from before a time (epoch seconds) and what was said of them.

    None where there are none.
    """
    if ledger.connection.execute(f"{OF_OLD} LIMIT 1", [before]).fetchone() is None:
        return None
    where = {**of_answers(OF_OLD), "observations": '"at" < ?'}
    return Removal(ledger.path, lambda _: where, before)


def of_answers(answers: str) -> dict[str, str]:
    """Return the condition for each table that says something of answers, whose ids a query returns."""
    return {table: f"{column} IN ({answers})" for table, column in OF_ANSWERS.items()}


def purge(ledger: Ledger, spool: Path, snapshot: Path, removal: Removal) -> dict[str, int]:
    """Do a removal from ledger, spool and snapshot; return how many rows and lines went, by table.

    For a ledger that nobody waits for. Events in the spool are ingested first and so removed too; files that
    writers hold open (`Spool` hands them over within a quarter of a second) are found by a second call.
    """
    ledger.ingest(spool)
    rejected = purge_rejected(spool, removal)
    return remove(ledger, snapshot, removal) | {"rejected": rejected}


def remove(ledger: Ledger, snapshot: Path, removal: Removal) -> dict[str, int]:
    """Do a whole removal on the thread that owns the ledger; return how many rows went, by table."""
    # Also when there is no such row: the file may hold bytes of rows that were deleted otherwise.
    ledger.snapshot(snapshot)
    removal.copy(snapshot)
    removed = removal.switch(ledger)
    ledger.snapshot(snapshot)
    return removed


def _count(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0])


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def purge_rejected(spool: Path, removal: Removal) -> int:
    """Remove a removal's lines from a spool's rejected files; return how many."""
    removed, folder = 0, spool / REJECTED
    for path in folder.glob("*") if folder.is_dir() else ():
        lines = list(read_lines(path))
        kept = [line for line in lines if not _is_of(line, removal.field, removal.values)]
        if len(kept) == len(lines):
            continue
        removed += len(lines) - len(kept)
        write_whole(path, b"".join(kept))
        if not kept:
            path.unlink()
    return removed


def _is_of(line: bytes, field: str, values: Sequence[str]) -> bool:
    try:
        event: Any = json.loads(line)
    except ValueError:
        # A torn or foreign line that has it as a value of JSON.
        return any(json.dumps(value).encode() in line for value in values)
    return isinstance(event, dict) and event.get(field) in values
