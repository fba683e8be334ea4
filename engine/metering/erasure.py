"""Erasure of a tenant's single requests from the usage log, down to their bytes; hourly sums stay."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import ServiceError
from engine.metering.dead_gateways import ADMITTED, JOURNALS, close_dead, lines
from engine.metering.raw_usage import copy_parquet
from engine.metering.usage_rows import Metered, begin, connect

EXPORT_S = 60.0
DELETE = """
    DELETE FROM requests WHERE tenant = ? AND state != 'admitted' AND seq < (SELECT max(seq) FROM requests)
"""
# The newest row stays, so that no number is given twice.
BLANK = """
    UPDATE requests SET id = '', tenant = '', key = '', policy = '', revision = ''
    WHERE tenant = ? AND state != 'admitted'
"""
KEPT = {
    "hourly_sums": "SELECT count(*) FROM hours WHERE tenant = ?",
    "requests_under_way": "SELECT count(*) FROM requests WHERE tenant = ? AND state = 'admitted'",
}


def erase(root: Path, tenant: str) -> tuple[dict[str, int], dict[str, int]]:
    """Remove a tenant's closed requests; return what was removed by table, and what is kept.

    Kept are hourly sums, and requests under way, which a second call finds closed. Idempotent. Raises
    `ServiceError` while another process holds the files; some requests may then be removed.
    """
    if not (root / "usage.db").is_file():
        return {}, {}
    try:
        with (
            FileLock(root / "export.lock", timeout=EXPORT_S),
            closing(connect(root / "usage.db")) as connection,
        ):
            # Overwrites what is deleted.
            connection.execute("PRAGMA secure_delete=ON")
            close_dead(root, connection)
            with begin(connection):
                removed = sum(connection.execute(query, (tenant,)).rowcount for query in (DELETE, BLANK))
            exported = _erase_exported(root, connection, tenant)
            # The write-ahead log has the rows too, until it is emptied.
            (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if is_busy:
                raise ServiceError("Deleted rows are still in usage.db-wal, which is in use. Try again.")
            kept = {name: connection.execute(query, (tenant,)).fetchone()[0] for name, query in KEPT.items()}
            kept["requests_under_way"] += _in_journals(root, connection, tenant)
    except (Timeout, sqlite3.Error) as error:
        raise ServiceError(f"The usage log in {root} is in use: {error}. Try again.") from None
    return {"requests": removed, "exported": exported}, kept


def _in_journals(root: Path, connection: sqlite3.Connection, tenant: str) -> int:
    """Return how many requests of the tenant are in journals alone, which become rows within a moment."""
    count = 0
    for gateway, written in connection.execute("SELECT * FROM gateways").fetchall():
        with suppress(FileNotFoundError):
            new = lines(root / JOURNALS / gateway, written)
            count += sum(kind == ADMITTED and Metered(*fields).tenant == tenant for _, kind, fields in new)
    return count


def _erase_exported(root: Path, connection: sqlite3.Connection, tenant: str) -> int:
    """Write the Parquet files anew that have requests of the tenant; return how many requests."""
    import duckdb

    removed = 0
    for (file,) in connection.execute("SELECT file FROM exported").fetchall():
        path = root / "raw" / file
        if not path.is_file():
            # Someone keeps it elsewhere.
            continue
        with closing(duckdb.connect()) as database:
            query = "SELECT count(*), count(*) FILTER (tenant = ?) FROM read_parquet(?)"
            rows, theirs = database.execute(query, [tenant, str(path)]).fetchall()[0]
        removed += theirs
        if theirs == rows:
            with begin(connection):
                connection.execute("DELETE FROM exported WHERE file = ?", (file,))
            path.unlink()
        elif theirs:
            # A day of many requests does not fit into memory.
            copy_parquet(path, [path], "tenant != ?", [tenant])
    return removed
