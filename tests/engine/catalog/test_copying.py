"""A catalog's rows in the other database: all of them, whole or not at all, and only into an empty one."""

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import select

from engine.catalog import copying, tables
from engine.catalog.access import open_engine
from engine.catalog.audit import Audit
from engine.catalog.catalog import Policy, migrate
from engine.catalog.copying import copy_catalog, copy_sqlite, snapshot
from engine.catalog.opening import whole_catalog
from engine.controller.route_changes import LEASE
from engine.errors import ConfigError, Conflict, NotFound, ServiceError
from tests.helpers.command_line import graftwork
from tests.helpers.kept_adapters import bare
from tests.helpers.live import eventually
from tests.helpers.postgres import fresh_database

Rows = dict[str, list[dict[str, Any]]]
# Two of each column's type, for two rows of a table.
VALUES: dict[type, tuple[Any, Any]] = {
    sa.String: ("one", "two ü"),
    sa.Integer: (1, 2),
    sa.Float: (1.0625, 1.7e9 + 1 / 3),
    sa.LargeBinary: (b"\x00" * 32, b"\xff" * 32),
    sa.JSON: ({"a": [1, 0.1, None]}, {"ü": {}}),
    sa.Boolean: (True, False),
}


def fill_all(url: str) -> None:
    """Put two rows into every table that there is."""
    migrate(url)
    engine = open_engine(url)
    with engine.execution_options(write=True).begin() as connection:
        for table in tables.metadata.sorted_tables:
            for which in (0, 1) if table.name != "catalog" else ():
                row = {
                    column.name: next(
                        pair[which] for kind, pair in VALUES.items() if isinstance(column.type, kind)
                    )
                    for column in table.columns
                    # What may be missing is missing in the first row.
                    if which or not column.nullable
                }
                connection.execute(table.insert(), row)
    engine.dispose()


def rows_of(url: str) -> Rows:
    engine = open_engine(url)
    with engine.connect() as connection:
        found = {
            table.name: [
                dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()
            ]
            for table in tables.metadata.sorted_tables
        }
    engine.dispose()
    return found


def as_copied(rows: Rows) -> Rows:
    """Return the rows of a catalog as a copy has them: it runs nowhere."""
    return (
        rows
        | {"replicas": [], "replica_loads": []}
        | {"leases": [row | {"until": 0.0} for row in rows["leases"]]}
    )


@pytest.fixture
def source(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/source.db"
    fill_all(url)
    return url


def test_every_row_goes_to_postgres_and_back(source: str, postgres_server: str, tmp_path: Path) -> None:
    there, back = fresh_database(postgres_server), f"sqlite:///{tmp_path}/new/back.db"
    counts = copy_catalog(source, there)
    wanted = as_copied(rows_of(source))
    assert counts == {name: len(rows) for name, rows in wanted.items() if name not in copying.RUNNING}
    assert set(counts.values()) == {1, 2}
    assert rows_of(there) == wanted
    copy_catalog(there, back)
    assert rows_of(back) == wanted
    assert [path.name for path in (tmp_path / "new").iterdir() if path.suffix != ".lock"] == ["back.db"]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_copy_is_a_catalog_to_work_with(
    kind: str, request: pytest.FixtureRequest, sqlite_catalog_url: str, tmp_path: Path
) -> None:
    with closing(whole_catalog(sqlite_catalog_url)) as catalog:
        catalog.policies.add(Policy("sorting", "b" * 64, {}, "me", 1.0))
        catalog.revisions.add_many([bare("sorting", number) for number in range(5)])
        key = catalog.keys.create("me", "user")
        wanted = (
            Audit(catalog.access).verify(),
            catalog.id,
            catalog.secret,
            catalog.revisions.page("sorting"),
        )
    target = f"sqlite:///{tmp_path}/copy.db"
    if kind == "postgresql":
        target = fresh_database(request.getfixturevalue("postgres_server"))
    copy_catalog(sqlite_catalog_url, target)
    with closing(whole_catalog(target)) as copy:
        assert (Audit(copy.access).verify(), copy.id, copy.secret, copy.revisions.page("sorting")) == wanted
        assert copy.keys.find(key)
        # Its numbers go on after the copied ones.
        copy.revisions.add_many([bare("sorting", 5)])
        copy.tombstones.add("sorting", bare("sorting", 1).digest, "bad", "ada")
        assert len(copy.revisions.page("sorting")) == 6


def test_it_is_as_of_one_moment_while_others_write(sqlite_catalog_url: str, postgres_server: str) -> None:
    """Each policy and its revision are there together: the writer adds both in turn, forever."""
    stop = multiprocessing.get_context("fork").Event()
    writer = multiprocessing.get_context("fork").Process(target=write_on, args=(sqlite_catalog_url, stop))
    writer.start()
    try:
        for turn in range(3):
            # It writes more meanwhile.
            assert eventually(partial(has_more, sqlite_catalog_url, turn))
            target = fresh_database(postgres_server)
            copy_catalog(sqlite_catalog_url, target)
            with closing(whole_catalog(target)) as copy:
                policies, _ = Audit(copy.access).verify()
                named = {row["subject"] for row in rows_of(target)["audit"]}
                assert {row["name"] for row in rows_of(target)["policies"]} <= named
            assert policies > turn
    finally:
        stop.set()
        writer.join(10)


def has_more(url: str, policies: int) -> bool:
    with closing(whole_catalog(url)) as catalog:
        return catalog.policies.count() > policies


def write_on(url: str, stop: Any) -> None:
    with closing(whole_catalog(url)) as catalog:
        number = 0
        while not stop.is_set():
            number += 1
            catalog.policies.add(Policy(f"p{number}", "b" * 64, {}, "me", 1.0))


def test_a_used_target_is_refused(source: str, postgres_server: str, tmp_path: Path) -> None:
    used, foreign = fresh_database(postgres_server), fresh_database(postgres_server)
    copy_catalog(source, used)
    before = rows_of(used)
    with closing(open_engine(foreign).raw_connection()) as connection:
        connection.cursor().execute("CREATE TABLE theirs (id int)")
        connection.commit()
    file = tmp_path / "theirs.db"
    file.write_bytes(b"theirs")
    for target in (used, foreign, f"sqlite:///{file}"):
        with pytest.raises(Conflict, match="is not empty"):
            copy_catalog(source, target)
    assert (rows_of(used), file.read_bytes()) == (before, b"theirs")


def test_a_database_that_a_start_has_made_counts_as_empty(source: str, postgres_server: str) -> None:
    target = fresh_database(postgres_server)
    migrate(target)
    copy_catalog(source, target)
    assert rows_of(target) == as_copied(rows_of(source))


def test_a_source_that_is_none_is_refused(sqlite_catalog_url: str, tmp_path: Path) -> None:
    target = f"sqlite:///{tmp_path}/target.db"
    with pytest.raises(NotFound, match="no catalog"):
        copy_catalog(f"sqlite:///{tmp_path}/nowhere.db", target)
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999', usable_since = '9999'")
    with pytest.raises(ConfigError, match="has schema 9999"):
        copy_catalog(sqlite_catalog_url, target)
    assert not (tmp_path / "target.db").exists()


def copy_and_die(source: str, target: str, after: int) -> None:
    seen = 0

    def on_rows(table: str, rows: int) -> None:
        nonlocal seen
        seen += 1
        if seen == after:
            os.kill(os.getpid(), signal.SIGKILL)

    copy_catalog(source, target, on_rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_killed_it_leaves_nothing_and_goes_through_the_next_time(
    kind: str, request: pytest.FixtureRequest, source: str, tmp_path: Path
) -> None:
    target = f"sqlite:///{tmp_path}/target.db"
    if kind == "postgresql":
        target = fresh_database(request.getfixturevalue("postgres_server"))
    for after in (1, 5, len(tables.metadata.sorted_tables) - 3):
        child = multiprocessing.get_context("fork").Process(target=copy_and_die, args=(source, target, after))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert not (tmp_path / "target.db").exists()
        copying.require_empty(target)
    copy_catalog(source, target)
    assert rows_of(target) == as_copied(rows_of(source))
    assert not list(tmp_path.glob("target.db.*"))


def test_a_snapshot_of_sqlite_frees_the_leases_alone(source: str, tmp_path: Path) -> None:
    snapshot(source, tmp_path / "copy.db")
    assert rows_of(f"sqlite:///{tmp_path}/copy.db") == as_copied(rows_of(source))


@pytest.mark.long
def test_a_locked_database_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "LOCKED_S", 0.3)
    with closing(sqlite3.connect(tmp_path / "locked.db", isolation_level=None)) as holder:
        holder.execute("CREATE TABLE t (x)")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ServiceError, match=r"locked"):
            copy_sqlite(tmp_path / "locked.db", tmp_path / "copy.db")


def test_the_command_copies_and_refuses_while_a_controller_runs(source: str, tmp_path: Path) -> None:
    with closing(whole_catalog(source)) as catalog:
        catalog.leases.acquire(LEASE, "elsewhere", 60)
        refused = graftwork("backup", "copy-catalog", source, f"sqlite:///{tmp_path}/there.db")
        assert (refused.returncode, "graftwork down" in refused.stderr) == (6, True)
        assert not (tmp_path / "there.db").exists()
        catalog.leases.release(LEASE, "elsewhere")
    said = graftwork("backup", "copy-catalog", source, f"sqlite:///{tmp_path}/there.db", "--json")
    assert json.loads(said.stdout)["rows"]["revisions"] == 2
    assert (
        "2 revisions" in graftwork("backup", "copy-catalog", source, f"sqlite:///{tmp_path}/again.db").stdout
    )
    assert rows_of(f"sqlite:///{tmp_path}/there.db") == rows_of(f"sqlite:///{tmp_path}/again.db")


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.timeout(900)
def test_a_hundred_thousand_revisions_both_ways(
    sqlite_catalog_url: str, postgres_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(whole_catalog(sqlite_catalog_url)) as catalog:
        catalog.policies.add(Policy("sorting", "b" * 64, {}, "me", 1.0))
        for first in range(0, 100_000, 10_000):
            catalog.revisions.add_many([bare("sorting", first + number) for number in range(10_000)])
    there, back = fresh_database(postgres_server), f"sqlite:///{tmp_path}/back.db"
    took = []
    for source, target in ((sqlite_catalog_url, there), (there, back)):
        began = time.monotonic()
        assert copy_catalog(source, target)["revisions"] == 100_000
        took.append(time.monotonic() - began)
    assert rows_of(back) == rows_of(sqlite_catalog_url)
    with capsys.disabled():
        print(f"\n  10^5 revisions to Postgres in {took[0]:.1f} s, back to SQLite in {took[1]:.1f} s")
