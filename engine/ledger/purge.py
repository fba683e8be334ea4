"""Removal of a policy's rows from the ledger, its spool and its snapshot, down to their bytes.

DuckDB marks deleted rows and keeps their bytes (it does not compact tables that have a key), so the file is
rewritten from the remaining rows and renamed over the old one.
"""

import json
from pathlib import Path
from typing import Any

import duckdb

from engine.files import sync, write_whole
from engine.ledger.ledger import Ledger, create
from engine.ledger.spool import read_lines

FRESH = ".fresh"


def purge(ledger: Ledger, spool: Path, snapshot: Path, policy: str) -> dict[str, int]:
    """Remove a policy's events from ledger, spool and snapshot; return how many of each, by table.

    Events in the spool are ingested first and so removed too; files that writers hold open (`Spool` hands
    them over within a quarter of a second) are found by a second call. Feedback is removed with the
    observations that it rates.
    """
    ledger.ingest(spool)
    removed = _delete(ledger, policy)
    removed["rejected"] = _purge_rejected(spool / "rejected", policy)
    # Also when nothing was found: an earlier purge may have been killed between the rows and their bytes.
    rewrite(ledger)
    for copy in snapshot.parent.glob(f"{snapshot.name}.*"):
        # A copy that a kill left half written: none is being written now.
        copy.unlink(missing_ok=True)
    ledger.touch()
    ledger.snapshot(snapshot)
    return removed


def _delete(ledger: Ledger, policy: str) -> dict[str, int]:
    tables = sorted(table for table, columns in ledger.columns.items() if "policy" in columns)
    rated = "DELETE FROM feedback WHERE request_id IN (SELECT id FROM observations WHERE policy = ?)"
    connection = ledger.connection
    connection.begin()
    try:
        removed = {"feedback": _changed(connection, rated, policy)}
        for table in tables:
            removed[table] = _changed(connection, f"DELETE FROM {table} WHERE policy = ?", policy)
        connection.commit()
    except duckdb.Error:
        connection.rollback()
        raise
    return removed


def _changed(connection: duckdb.DuckDBPyConnection, statement: str, policy: str) -> int:
    row = connection.execute(statement, [policy]).fetchone()
    return int(row[0]) if row else 0


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


def _purge_rejected(folder: Path, policy: str) -> int:
    """Remove a policy's lines from the rejected files; return how many."""
    removed = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        lines = list(read_lines(path))
        kept = [line for line in lines if not _is_of(line, policy)]
        if len(kept) == len(lines):
            continue
        removed += len(lines) - len(kept)
        write_whole(path, b"".join(kept))
        if not kept:
            path.unlink()
    return removed


def _is_of(line: bytes, policy: str) -> bool:
    try:
        event: Any = json.loads(line)
    except ValueError:
        # A torn or foreign line that names the policy as a value of JSON.
        return json.dumps(policy).encode() in line
    return isinstance(event, dict) and event.get("policy") == policy
