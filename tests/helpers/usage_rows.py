"""Rows of single requests in a usage log, wherever they are by now."""

from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb

from engine.metering.usage_rows import connect


def usage_rows(usage: Path, columns: str) -> list[tuple[Any, ...]]:
    """Return these columns of each request: after a minute or two its row is in Parquet."""
    with closing(connect(usage / "usage.db")) as connection:
        connection.execute("BEGIN")
        here = connection.execute(f"SELECT {columns} FROM requests ORDER BY seq").fetchall()
        noted = connection.execute("SELECT file FROM exported ORDER BY first").fetchall()
    files = [str(usage / "raw" / file) for (file,) in noted]
    moved = duckdb.sql(f"SELECT {columns} FROM read_parquet({files})").fetchall() if files else []
    return [*moved, *here]
