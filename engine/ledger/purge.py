"""Removal of rows from ledger, spool and snapshot, down to their bytes: a policy's, some keys', old ones.

DuckDB marks deleted rows and keeps their bytes (it does not compact tables that have a key), so the file is
rewritten from the remaining rows and renamed over the old one.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from engine.files import sync, write_whole
from engine.ledger.ledger import Ledger, create
from engine.ledger.spool import REJECTED, read_lines

FRESH = ".fresh"


def purge(ledger: Ledger, spool: Path, snapshot: Path, policy: str) -> dict[str, int]:
    """Remove a policy's events from ledger, spool and snapshot; return how many of each, by table.

    Events in the spool are ingested first and so removed too; files that writers hold open (`Spool` hands
    them over within a quarter of a second) are found by a second call. Feedback is removed with the
    observations that it rates.
    """
    ledger.ingest(spool)
    tables = sorted(table for table, columns in ledger.columns.items() if "policy" in columns)
    rated = "request_id IN (SELECT id FROM observations WHERE policy = ?)"
    where = {"feedback": rated} | dict.fromkeys(tables, "policy = ?")
    removed = _delete(ledger, where, policy)
    removed["rejected"] = _purge_rejected(spool / REJECTED, "policy", [policy])
    _overwrite(ledger, snapshot)
    return removed


def erase(ledger: Ledger, spool: Path, snapshot: Path, keys: Sequence[str]) -> dict[str, int]:
    """Remove what was asked and rated by these keys (hashes), as `purge` does."""
    ledger.ingest(spool)
    asked = "list_contains(?, key)"
    rated = f"{asked} OR request_id IN (SELECT id FROM observations WHERE list_contains(?, key))"
    removed = _delete(ledger, {"feedback": rated, "observations": asked}, list(keys))
    removed["rejected"] = _purge_rejected(spool / REJECTED, "key", keys)
    _overwrite(ledger, snapshot)
    return removed


def forget(ledger: Ledger, snapshot: Path, before: float) -> dict[str, int]:
    """Remove observations from before a time (epoch seconds), and their feedback; return how many of each."""
    old = 'SELECT id FROM observations WHERE "at" < ?'
    if ledger.connection.execute(f"{old} LIMIT 1", [before]).fetchone() is None:
        return {}
    where = {"feedback": f"request_id IN ({old})", "observations": '"at" < ?'}
    removed = _delete(ledger, where, before)
    _overwrite(ledger, snapshot)
    return removed


def _overwrite(ledger: Ledger, snapshot: Path) -> None:
    """Remove the bytes of deleted rows from ledger and snapshot."""
    # Also when nothing was found: an earlier call may have been killed between the rows and their bytes.
    rewrite(ledger)
    for copy in snapshot.parent.glob(f"{snapshot.name}.*"):
        # A copy that a kill left half written: none is being written now.
        copy.unlink(missing_ok=True)
    ledger.touch()
    ledger.snapshot(snapshot)


def _delete(ledger: Ledger, where: Mapping[str, str], value: Any) -> dict[str, int]:
    """Delete rows of each table by its condition, whose every mark stands for `value`, in one transaction."""
    connection, removed = ledger.connection, {}
    connection.begin()
    try:
        for table, condition in where.items():
            values = [value] * condition.count("?")
            row = connection.execute(f"DELETE FROM {table} WHERE {condition}", values).fetchone()
            removed[table] = int(row[0]) if row else 0
        connection.commit()
    except duckdb.Error:
        connection.rollback()
        raise
    return removed


def rewrite(ledger: Ledger) -> None:
    """Rewrite the ledger's file, rows in their order; a kill leaves the old file."""
    fresh = ledger.path.with_name(f"{ledger.path.name}{FRESH}")
    for leftover in (fresh, fresh.with_name(f"{fresh.name}.wal")):
        leftover.unlink(missing_ok=True)
    create(fresh)
    ledger.connection.execute(f"ATTACH '{_quoted(fresh)}' AS fresh")
    for table in ledger.columns:
        ledger.connection.execute(f"INSERT INTO fresh.{table} BY NAME SELECT * FROM {table} ORDER BY rowid")
    ledger.connection.execute("CHECKPOINT fresh")
    ledger.connection.execute("DETACH fresh")
    # Empty the write-ahead log, which the new file would find beside it.
    ledger.connection.execute("CHECKPOINT")
    sync(fresh)
    ledger.become(fresh)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _purge_rejected(folder: Path, field: str, values: Sequence[str]) -> int:
    """Remove lines with one of these values in a field from the rejected files; return how many."""
    removed = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        lines = list(read_lines(path))
        kept = [line for line in lines if not _is_of(line, field, values)]
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
