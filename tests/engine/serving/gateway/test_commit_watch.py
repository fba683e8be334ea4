"""A commit of anybody else is noticed, with a query only where something has changed."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.serving.gateway.catalog_rows import CommitWatch


def opened(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE IF NOT EXISTS rows (number INTEGER)")
    return connection


@pytest.fixture(params=["wal", "delete"])
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    with closing(opened(tmp_path / "catalog.db", request.param)) as connection:
        yield connection


def queries(watch: CommitWatch) -> list[str]:
    """Return the list to which the watch's queries are added."""
    found: list[str] = []
    watch.connection.set_trace_callback(found.append)
    return found


def test_each_commit_changes_the_number(tmp_path: Path, writer: sqlite3.Connection) -> None:
    with closing(CommitWatch(str(tmp_path / "catalog.db"))) as watch:
        seen = [watch.commits()]
        for number in range(50):
            writer.execute("INSERT INTO rows VALUES (?)", (number,))
            if number % 10 == 5:
                writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            seen.append(watch.commits())
            assert watch.commits() == seen[-1]
            # What is read after the look has the commit.
            assert watch.connection.execute("SELECT count(*) FROM rows").fetchone() == (number + 1,)
    assert len(set(seen)) == 51


def test_where_nobody_commits_nothing_is_queried(tmp_path: Path) -> None:
    with (
        closing(opened(tmp_path / "catalog.db", "wal")) as writer,
        closing(CommitWatch(str(tmp_path / "catalog.db"))) as watch,
    ):
        for _ in range(2):
            watch.commits()
        told = queries(watch)
        for _ in range(100):
            watch.commits()
        assert told == []
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO rows VALUES (1)")
        before = watch.commits()
        writer.execute("COMMIT")
        assert watch.commits() != before


def test_the_index_of_another_database_is_none(tmp_path: Path) -> None:
    """A file that a crash has left beside a database without a write-ahead log."""
    (tmp_path / "catalog.db-shm").write_bytes(bytes(32768))
    with (
        closing(opened(tmp_path / "catalog.db", "delete")) as writer,
        closing(CommitWatch(str(tmp_path / "catalog.db"))) as watch,
    ):
        before = [watch.commits() for _ in range(3)][-1]
        writer.execute("INSERT INTO rows VALUES (1)")
        assert watch.commits() != before


def test_after_its_end_it_says_so(tmp_path: Path, writer: sqlite3.Connection) -> None:
    watch = CommitWatch(str(tmp_path / "catalog.db"))
    watch.commits()
    watch.close()
    with pytest.raises(sqlite3.ProgrammingError):
        watch.commits()
