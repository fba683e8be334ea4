"""The ledger as Parquet files in a directory or behind a URL, for any DuckDB.

    catalog.id                                    the catalog whose ledger this is
    manifest.json                                 what each file holds, and when the archive was last complete
    ledger/TABLE/day=YYYY-MM-DD/rows.parquet      the rows of one day (UTC)

The archive follows the ledger: a day is written again when its rows have changed, also by a late event, and
its file is removed when a purge or `observations_days` has left none. A file is there whole or not at all.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
from filelock import FileLock

from engine.backup.place import OWNER, BackupPlace
from engine.errors import ConfigError, MissingBytes
from engine.files import write_whole
from engine.ledger.ledger import open_snapshot
from engine.threads import PeriodicThread

MANIFEST, FORMAT = "manifest.json", 1
EVERY_S = 3600.0
# How long a turn waits for another process's.
LOCK_S = 600.0
Contents = dict[str, dict[str, Any]]
DAY = "strftime(epoch_ms(CAST(floor(\"at\" * 1000) AS BIGINT)), '%Y-%m-%d')"


@dataclass(frozen=True)
class Archived:
    """What a turn did, and what is in the archive after it."""

    written: int
    removed: int
    files: int
    rows: int
    newest_day: str | None


def archive(snapshot: Path, place: BackupPlace, owner: str, now: float | None = None) -> Archived:
    """Bring the archive up to the ledger's snapshot; what is up to date stays as it is.

    Idempotent: after a crash or an error the next call does what is left. Raises `ConfigError` when the place
    holds the ledger of another catalog, and `ServiceError` when it does not answer.
    """
    if place.owner() not in (None, owner):
        raise ConfigError(
            f"{place.address} has the ledger of another installation. Nothing was written. Set "
            "controller.archive to another place."
        )
    before = _manifest(place)
    with closing(open_snapshot(snapshot)) as ledger:
        contents = _contents(ledger)
        stale = [name for name, what in contents.items() if before.get(name) != what]
        gone = [name for name in before if name not in contents]
        if place.owner() is None:
            place.write(OWNER, owner.encode())
        for name in stale:
            place.write(name, _parquet(ledger, name))
    for name in gone:
        place.remove(name)
    # Last: a turn that ends before it writes the same files again.
    manifest = {"format": FORMAT, "at": time.time() if now is None else now, "files": contents}
    place.write(MANIFEST, json.dumps(manifest).encode())
    rows = sum(what["rows"] for what in contents.values())
    newest = max((_parts(name)[1] for name in contents), default=None)
    return Archived(len(stale), len(gone), len(contents), rows, newest)


def _manifest(place: BackupPlace) -> Contents:
    try:
        manifest = json.loads(place.read(MANIFEST))
    except MissingBytes:
        return {}
    if manifest["format"] > FORMAT:
        raise ConfigError(
            f"{place.address} was written by a newer version of Graftwork. Nothing was changed. Upgrade this "
            "one."
        )
    contents: Contents = manifest["files"]
    return contents


def _contents(ledger: duckdb.DuckDBPyConnection) -> Contents:
    """Return what the archive should hold: each file's number of rows, and a hash of ids and columns."""
    tables = """
        SELECT table_name, string_agg(column_name || ' ' || data_type, ',' ORDER BY column_index)
        FROM duckdb_columns() WHERE database_name = current_database() AND NOT internal
        AND table_name IN (SELECT table_name FROM duckdb_tables()) AND table_name <> 'migrations'
        GROUP BY table_name ORDER BY table_name
    """
    contents: Contents = {}
    for table, columns in ledger.execute(tables).fetchall():
        query = f"SELECT {DAY}, count(*), bit_xor(hash(id, ?)) FROM {table} GROUP BY 1 ORDER BY 1"
        for day, rows, hashed in ledger.execute(query, [columns]).fetchall():
            contents[f"ledger/{table}/day={day}/rows.parquet"] = {"rows": rows, "hash": str(hashed)}
    return contents


def _parts(name: str) -> tuple[str, str]:
    """Return the table and the day of a file."""
    _, table, day, _ = name.split("/")
    return table, day.removeprefix("day=")


def _parquet(ledger: duckdb.DuckDBPyConnection, name: str) -> bytes:
    table, day = _parts(name)
    with tempfile.TemporaryDirectory(prefix="archive-") as folder:
        file = Path(folder) / "rows.parquet"
        rows = f"FROM {table} WHERE {DAY} = '{day}' ORDER BY \"at\", id"
        ledger.execute(f"COPY ({rows}) TO '{file}' (FORMAT parquet, COMPRESSION zstd)")
        return file.read_bytes()


class Archiver(PeriodicThread):
    """Archives every hour, keeps the last result in `state`, and tells each error."""

    def __init__(
        self, snapshot: Path, place: BackupPlace, owner: str, state: Path, tell: Callable[[str | None], None]
    ):
        super().__init__("ledger archive", EVERY_S, self.turn)
        self._snapshot, self._place, self._owner = snapshot, place, owner
        self._state, self._tell = state, tell

    def turn(self) -> None:
        """Archive once; an error is told, and the next turn does what is left."""
        if not self._snapshot.is_file():
            return
        now = time.time()
        last = read_state(self._state)
        try:
            # Of two at once the older snapshot could write a day's file last.
            with FileLock(self._state.with_suffix(".lock"), timeout=LOCK_S):
                done = archive(self._snapshot, self._place, self._owner)
        except Exception as error:
            self._write({**last, "error": str(error), "error_at": now})
            self._tell(str(error))
            raise
        result = {"at": now, "files": done.files, "rows": done.rows, "newest_day": done.newest_day}
        self._write({**result, "place": self._place.address, "error": None})
        self._tell(None)

    def _write(self, state: Mapping[str, Any]) -> None:
        write_whole(self._state, json.dumps({"place": self._place.address, **state}).encode())


def read_state(file: Path) -> dict[str, Any]:
    """Return what the archiver's last turn told; empty before the first."""
    return dict(json.loads(file.read_text())) if file.is_file() else {}
