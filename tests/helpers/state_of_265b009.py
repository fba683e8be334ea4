"""Databases as commit 265b009 has left them, by its own migrations; the catalog has a policy and a key."""

import sqlite3
from contextlib import closing
from pathlib import Path

import duckdb
import psycopg
from sqlalchemy import make_url

DUMPS = Path(__file__).parent.parent / "data" / "265b009"


def leave_catalog_of_265b009(url: str) -> None:
    if not url.startswith("sqlite"):
        address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(address) as connection:
            connection.execute((DUMPS / "catalog.postgresql.sql").read_bytes())
        return
    path = Path(str(make_url(url).database))
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((DUMPS / "catalog.sqlite.sql").read_text())


LEDGER_VERSION = 11


def ledger_of_265b009(path: Path, version: int = LEDGER_VERSION) -> duckdb.DuckDBPyConnection:
    """Return a ledger, with the marks of its migrations up to this version."""
    old = duckdb.connect(str(path))
    old.execute('CREATE TABLE migrations (version INTEGER PRIMARY KEY, "at" DOUBLE)')
    old.execute((DUMPS / "ledger.sql").read_text())
    old.execute("INSERT INTO migrations SELECT range, 0 FROM range(1, ?)", [version + 1])
    return old


def usage_log_of_265b009(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.executescript((DUMPS / "usage.sql").read_text())
    return connection
