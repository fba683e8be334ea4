"""Installations of two versions on one catalog: who goes on, who refuses, and what migrations may do."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from engine.catalog.access import open_engine, sqlite_path
from engine.catalog.audit import Audit
from engine.catalog.catalog import Base, Catalog, Replica, migrate
from engine.catalog.copying import copy_catalog, snapshot
from engine.catalog.migration import ADDED
from engine.catalog.opening import open_catalog, whole_catalog
from engine.catalog.records import OLDEST_SCHEMA, SCHEMA_VERSION, USABLE_SINCE
from engine.errors import ConfigError
from engine.settings.params import Paths
from tests.helpers.postgres import fresh_database
from tests.helpers.rows import NEW, OLD, THIRD, fill
from tests.helpers.state_of_265b009 import leave_catalog_of_265b009

NEWER = "0999"
RELEASE_OF_265B009 = """
    INSERT INTO releases (id, policy, revision, step, weight, state, settings, created_at, updated_at, reason,
        version, skip_gates, evidence, approved)
    VALUES ('r1', 'sorting', 'aa', 'approval', 0.2, 'running', '{"approval_s" : 60}', 1, 1, '', 0, '{}', '{}',
        '{"by" : "ann"}')
"""


def migrate_as_a_newer_version(url: str, usable_since: str = USABLE_SINCE) -> None:
    """Do what a later version's migration may do: add a table, and a column that older code leaves out."""
    engine = open_engine(url)
    with engine.execution_options(write=True).begin() as connection:
        connection.execute(sa.text("CREATE TABLE of_the_newer (id VARCHAR PRIMARY KEY)"))
        connection.execute(sa.text("ALTER TABLE replicas ADD COLUMN zone VARCHAR"))
        connection.execute(sa.text("ALTER TABLE routes ADD COLUMN region VARCHAR"))
        marks = "UPDATE alembic_version SET version_num = :found, usable_since = :since"
        connection.execute(sa.text(marks), {"found": NEWER, "since": usable_since})
    engine.dispose()


def test_what_runs_goes_on_when_a_newer_version_migrates_the_catalog(catalog_url: str) -> None:
    with closing(Catalog(catalog_url)) as catalog:
        fill(catalog)
        old = Replica("old:8460", "http://old:8460", "base", "1", "a", 0, 0.0, draining=False)
        catalog.replicas.join(old)
        migrate_as_a_newer_version(catalog_url)
        assert catalog.replicas.beat(old, {("sorting", NEW): None})
        assert [row.id for row in catalog.replicas.all()] == ["old:8460"]
        assert catalog.routes.get("sorting").champion == OLD
        route = catalog.routes.get("sorting")
        catalog.routes.update(replace(route, champion=NEW, previous=OLD), route.version)
        catalog.tombstones.add("sorting", NEW, "bad", "ada")
        assert catalog.routes.get("sorting").champion == NEW
        catalog.replicas.leave(old)


def test_an_older_version_starts_on_a_newer_catalog_that_only_added_and_migrates_nothing(
    catalog_url: str,
) -> None:
    """As `helm rollback` starts it, or Kubernetes an engine that crashed in the middle of an upgrade."""
    migrate_as_a_newer_version(catalog_url)
    before = schema_of(catalog_url)
    migrate(catalog_url)
    with closing(whole_catalog(catalog_url)) as catalog:
        assert catalog.access.schema == NEWER
        fill(catalog)
        base = Base("b" * 64, "tiny", "/bases/tiny", 1.0)
        catalog.bases.add(base)
        assert catalog.bases.get(base.digest) == base
        engine = Replica("old:8460", "http://old:8460", base.digest, "1", "a", 0, 0.0, draining=False)
        catalog.replicas.join(engine)
        route = catalog.routes.get("sorting")
        catalog.routes.update(replace(route, champion=NEW, previous=OLD), route.version)
        catalog.tombstones.add("sorting", NEW, "bad", "ada")
        assert [row.id for row in catalog.replicas.all()] == ["old:8460"]
        assert Audit(catalog.access).verify()[0] > 0
    assert schema_of(catalog_url) == before


def test_a_copy_by_an_older_version_has_what_that_version_knows_and_says_so(
    catalog_url: str, tmp_path: Path
) -> None:
    with closing(Catalog(catalog_url)) as catalog:
        fill(catalog)
    migrate_as_a_newer_version(catalog_url)
    with pytest.raises(ConfigError, match=f"schema {NEWER}.*upgrade"):
        copy_catalog(catalog_url, f"sqlite:///{tmp_path}/copy.db")
    # A backup goes on in a rollback.
    snapshot(catalog_url, tmp_path / "backup.db")
    migrate(f"sqlite:///{tmp_path}/backup.db")
    with closing(Catalog(f"sqlite:///{tmp_path}/backup.db")) as copy:
        assert copy.routes.get("sorting").champion == OLD


def test_an_older_version_neither_starts_on_nor_changes_a_catalog_that_more_was_done_to(
    catalog_url: str,
) -> None:
    migrate_as_a_newer_version(catalog_url, usable_since=NEWER)
    says = f"schema {NEWER}.*{SCHEMA_VERSION}.*upgrade"
    with pytest.raises(ConfigError, match=says):
        Catalog(catalog_url)
    with pytest.raises(ConfigError, match=says) as refused:
        migrate(catalog_url)
    # Neither password nor traceback of the migrations' library.
    assert "://" not in str(refused.value)
    engine = open_engine(catalog_url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() == NEWER
    engine.dispose()


def test_a_catalog_of_265b009_gets_the_schema_of_a_new_one_and_keeps_its_rows(
    catalog_url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    old_url = catalog_url.replace("catalog.db", "old.db")
    if old_url == catalog_url:
        old_url = fresh_database(request.getfixturevalue("postgres_server"))
    leave_catalog_of_265b009(old_url)
    with connected(old_url) as connection:
        connection.execute(sa.text(RELEASE_OF_265B009))
    says = f"schema {OLDEST_SCHEMA}.*{SCHEMA_VERSION}.*graftwork migrate"
    with pytest.raises(ConfigError, match=says):
        Catalog(old_url)
    if sqlite_path(old_url) is None:
        # Engines of the version before share it: neither an engine nor a command migrates it.
        before = schema_of(old_url)
        with pytest.raises(ConfigError, match=says):
            open_catalog(Paths(tmp_path, old_url), migrated=True)
        assert schema_of(old_url) == before
    for _ in range(2):
        migrate(old_url)
    assert schema_of(old_url) == schema_of(catalog_url)
    with closing(whole_catalog(old_url)) as catalog:
        assert catalog.routes.get("sorting").champion == OLD
        assert {row.digest for row in catalog.revisions.page("sorting")} == {OLD, NEW, THIRD}
        assert [key.owner for key in catalog.keys.all()] == ["ann"]
        assert catalog.bases.get("b" * 64).texts == []
        assert catalog.replicas.all() == []
        (release,) = catalog.releases.all()
        assert (release.approved, release.paused, release.asks) == ({"by": "ann"}, None, None)
        assert Audit(catalog.access).verify()[0] == 3


@pytest.mark.parametrize("found", ["0009", "0002"])
def test_an_older_catalog_than_265b009s_is_refused_and_stays_as_it_is(
    empty_catalog_url: str, found: str
) -> None:
    leave_catalog_of_265b009(empty_catalog_url)
    with connected(empty_catalog_url) as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :found"), {"found": found})
    before = schema_of(empty_catalog_url)
    for opens in (migrate, Catalog):
        with pytest.raises(ConfigError, match=f"schema {found}.*265b009"):
            opens(empty_catalog_url)
    assert schema_of(empty_catalog_url) == before


def test_a_version_only_adds_so_that_the_version_before_goes_on() -> None:
    """A column that must be filled, or one that goes, would stop the engines that are not upgraded yet."""
    assert all(OLDEST_SCHEMA < version <= SCHEMA_VERSION for version in ADDED)
    assert OLDEST_SCHEMA <= USABLE_SINCE <= SCHEMA_VERSION
    for statement in (statement for version in ADDED.values() for statement in version):
        assert re.fullmatch(r"ALTER TABLE \w+ ADD COLUMN .*|CREATE INDEX .*", statement)
        assert "NOT NULL" not in statement or "DEFAULT" in statement
        assert "UNIQUE" not in statement


def test_all_that_265b009_has_is_as_it_was(empty_catalog_url: str) -> None:
    """Whatever way a migration takes: nothing goes or changes, and older code may leave out what came."""
    leave_catalog_of_265b009(empty_catalog_url)
    before = schema_of(empty_catalog_url)
    migrate(empty_catalog_url)
    after = schema_of(empty_catalog_url)
    assert only_added(before, after) == []
    for harm in HARMS:
        with connected(empty_catalog_url) as connection:
            for statement in harm.split(";"):
                connection.exec_driver_sql(statement)
        assert only_added(after, schema_of(empty_catalog_url)), harm


HARMS = (
    "CREATE UNIQUE INDEX one_base ON policies (base)",
    "ALTER TABLE leases ADD COLUMN region VARCHAR; ALTER TABLE leases RENAME holder TO zone",
    "ALTER TABLE leases RENAME TO held",
)


def only_added(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what else happened to the tables of a schema than that something was added."""
    faults = []
    for table, had in before.items():
        if table in ("triggers", "version"):
            continue
        if table not in after:
            faults.append(f"{table} is gone")
            continue
        columns, *keys, indexes = had
        new_columns, *new_keys, new_indexes = after[table]
        added = [one for one in new_columns if one not in columns]
        faults += [f"{table}.{one['name']} changed" for one in columns if one not in new_columns]
        faults += [f"{table}.{one['name']}" for one in added if not (one["nullable"] or one["default"])]
        faults += [f"{table}'s keys"] * (keys != new_keys)
        faults += [f"{table}: {one[0]}" for one in new_indexes if one not in indexes and one[2]]
    return faults


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = open_engine(url)
    with engine.execution_options(write=True).begin() as connection:
        yield connection
    engine.dispose()


def described(index: Any) -> tuple[Any, ...]:
    where = sorted((name, str(value)) for name, value in index.get("dialect_options", {}).items())
    return index["name"], index["column_names"], index["unique"], where


def schema_of(url: str) -> dict[str, Any]:
    """Return the columns, keys, indexes and triggers of each table, and its version."""
    with connected(url) as connection:
        found = sa.inspect(connection)
        schema: dict[str, Any] = {
            table: (
                [{**column, "type": repr(column["type"])} for column in found.get_columns(table)],
                found.get_pk_constraint(table),
                found.get_unique_constraints(table),
                sorted(map(described, found.get_indexes(table))),
            )
            for table in found.get_table_names()
        }
        query = (
            "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY 1"
            if connection.dialect.name == "sqlite"
            else "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger ORDER BY 1"
        )
        schema["triggers"] = [tuple(row) for row in connection.exec_driver_sql(query)]
        schema["version"] = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return schema
