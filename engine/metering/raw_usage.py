"""Raw usage in Parquet, a folder a day: what the usage log's settled rows become after a while."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from engine.metering.usage_rows import KEPT_DAYS, begin, connect, periods

# Rows that were settled this many seconds ago are moved, at most `ROWS` in a transaction: requests wait for
# its end.
SETTLED_S = 60.0
ROWS = 5_000
# Files are merged by so many, without those that are large already: after each merge the log is synced.
MERGED_FILES, MERGED_BYTES = 60, 64 << 20
# Columns of the table `requests`, with their types in Parquet.
COLUMNS = {
    "seq": "BIGINT", "id": "VARCHAR", "gateway": "VARCHAR", "at": "DOUBLE", "tenant": "VARCHAR",
    "key": "VARCHAR", "policy": "VARCHAR", "revision": "VARCHAR", "purpose": "VARCHAR", "reserved": "BIGINT",
    "state": "VARCHAR", "status": "INTEGER", "prompt": "BIGINT", "completion": "BIGINT",
    "settled_at": "DOUBLE",
}  # fmt: skip
# The newest row stays, so that no number is given twice.
SETTLED = f"""
    SELECT {", ".join(COLUMNS)} FROM requests WHERE state != 'admitted' AND settled_at < ?
    AND seq < (SELECT max(seq) FROM requests) ORDER BY seq LIMIT ?
"""


def export(root: Path, now: float | None = None, go_on: Callable[[], bool] = lambda: True) -> int:
    """Move settled rows to Parquet files; return how many. One process does it at a time.

    `go_on` is asked after each transaction; the next call moves what is left.

    A file is written whole before its rows are removed, in one transaction with a note of the file. A file
    without a note is what a crash left, and its rows are still in the log.
    """
    now = time.time() if now is None else now
    with contextlib.suppress(Timeout), FileLock(root / "export.lock", timeout=0):
        with closing(connect(root / "usage.db")) as connection:
            _drop_unnoted(root, connection)
            moved = 0
            while some := _move(root, connection, now):
                moved += some
                if not go_on():
                    return moved
            old = periods(now - KEPT_DAYS * 86400)[0]
            with begin(connection):
                connection.execute("DELETE FROM spent WHERE period < ? AND length(period) = 10", (old,))
                connection.execute("DELETE FROM spent WHERE period < ? AND length(period) = 7", (old[:7],))
            _merge(root, connection, now, go_on)
        return moved
    return 0


def _move(root: Path, connection: Any, now: float) -> int:
    """Move at most `ROWS` settled rows; return how many."""
    rows: list[Any] = connection.execute(SETTLED, (now - SETTLED_S, ROWS)).fetchall()
    by_day: dict[str, list[Any]] = {}
    for row in rows:
        by_day.setdefault(periods(row[3])[0], []).append(row)
    for day, some in by_day.items():
        file = f"{day}/{some[0][0]}-{some[-1][0]}.parquet"
        write_parquet(root / "raw" / file, some)
        with begin(connection):
            connection.execute("INSERT INTO exported VALUES (?, ?, ?)", (file, some[0][0], some[-1][0]))
            connection.executemany("DELETE FROM requests WHERE seq = ?", [(row[0],) for row in some])
    return len(rows)


def _merge(root: Path, connection: Any, now: float, go_on: Callable[[], bool]) -> None:
    """Merge the files of each day that is over into few: there is a new one each minute.

    Rows stay in their order. A crash leaves the small files, or files without a note, which go later.
    """
    today = periods(now - SETTLED_S)[0]
    noted = connection.execute(
        "SELECT file, first, last FROM exported WHERE file < ? ORDER BY first", (today,)
    )
    by_day: dict[str, list[tuple[str, int, int]]] = {}
    for file, first, last in noted.fetchall():
        path = root / "raw" / file
        # Someone may keep it elsewhere.
        if path.is_file() and path.stat().st_size < MERGED_BYTES:
            by_day.setdefault(file.partition("/")[0], []).append((file, first, last))
    for day, files in by_day.items():
        for some in (files[at : at + MERGED_FILES] for at in range(0, len(files), MERGED_FILES)):
            if len(some) > 1:
                if not go_on():
                    return
                _merge_some(root, connection, day, some)


def _merge_some(root: Path, connection: Any, day: str, files: Sequence[tuple[str, int, int]]) -> None:
    """Merge some files of a day into one."""
    first, last = files[0][1], max(last for _, _, last in files)
    # A row that was settled late may lie within the numbers of a file that was merged before.
    name, sources = f"{day}/{first}-{last}-{uuid.uuid4().hex[:8]}.parquet", [file for file, _, _ in files]
    copy_parquet(root / "raw" / name, [root / "raw" / file for file in sources])
    with begin(connection):
        connection.executemany("DELETE FROM exported WHERE file = ?", [(file,) for file in sources])
        connection.execute("INSERT INTO exported VALUES (?, ?, ?)", (name, first, last))
    for file in sources:
        (root / "raw" / file).unlink()


def copy_parquet(
    path: Path, sources: Sequence[Path], where: str = "true", values: Sequence[Any] = ()
) -> None:
    """Write rows of Parquet files, in their order, to a new file or over one of them; whole or not at all.

    `where` is a condition in SQL with a mark for each of `values`.
    """
    import duckdb

    draft = path.with_suffix(".draft")
    with closing(duckdb.connect(config={"threads": 1, "memory_limit": "512MB"})) as database:
        names = [str(source) for source in sources]
        copy = f"COPY (FROM read_parquet(?) WHERE {where}) TO ? (FORMAT parquet)"
        database.execute(copy, [names, *values, str(draft)])
    _put_in_place(draft, path)


def write_parquet(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write rows of `COLUMNS` to a Parquet file, whole and durable, or not at all."""
    import duckdb

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft, lines = path.with_suffix(".draft"), path.with_suffix(".lines")
    lines.touch(mode=0o600)
    # A row that Python inserts costs DuckDB fifty times as much as a line of JSON.
    lines.write_bytes(b"\n".join(orjson.dumps(dict(zip(COLUMNS, row, strict=True))) for row in rows))
    with closing(duckdb.connect(config={"threads": 1})) as database:
        read = f"read_json(?, format = 'newline_delimited', columns = {COLUMNS})"
        database.execute(f"COPY (FROM {read}) TO ? (FORMAT parquet)", [str(lines), str(draft)])
    lines.unlink()
    _put_in_place(draft, path)


def _put_in_place(draft: Path, path: Path) -> None:
    draft.chmod(0o600)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)


def _drop_unnoted(root: Path, connection: Any) -> None:
    noted = {file for (file,) in connection.execute("SELECT file FROM exported")}
    for path in (root / "raw").glob("*/*"):
        if str(path.relative_to(root / "raw")) not in noted:
            path.unlink()
