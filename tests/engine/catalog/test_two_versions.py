"""Installations of two versions on one catalog: who goes on, who refuses, and what migrations may do."""

import ast
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from engine.catalog import catalog as catalogs
from engine.catalog.access import open_engine
from engine.catalog.catalog import Catalog, Replica, migrate
from engine.catalog.records import SCHEMA_VERSION
from engine.errors import ConfigError
from tests.helpers.catalog_migrations import upgrade_to
from tests.helpers.rows import NEW, OLD, fill

MIGRATIONS = Path(catalogs.__file__).parent / "migrations" / "versions"
# From the table of engines on, engines of the version before go on with a migrated catalog.
FIRST_SHARED = "0010"
# What leaves the rows and queries of the version before as they are.
ADDITIVE = {"create_table", "create_index", "add_column"}
NEWER = "0999"


def migrate_as_a_newer_version(url: str) -> None:
    """Do what a later version's migration may do: add a table, and a column that older code leaves out."""
    engine = open_engine(url)
    with engine.execution_options(write=True).begin() as connection:
        connection.execute(sa.text("CREATE TABLE of_the_newer (id VARCHAR PRIMARY KEY)"))
        connection.execute(sa.text("ALTER TABLE replicas ADD COLUMN zone VARCHAR"))
        connection.execute(sa.text("ALTER TABLE routes ADD COLUMN region VARCHAR"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :found"), {"found": NEWER})
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


def test_an_older_version_neither_starts_nor_changes_a_newer_catalog(catalog_url: str) -> None:
    migrate_as_a_newer_version(catalog_url)
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


def test_a_newer_version_does_not_use_an_older_catalog_before_it_is_migrated(empty_catalog_url: str) -> None:
    upgrade_to(empty_catalog_url, FIRST_SHARED)
    says = f"schema {FIRST_SHARED}.*{SCHEMA_VERSION}.*controller"
    with pytest.raises(ConfigError, match=says):
        Catalog(empty_catalog_url)
    migrate(empty_catalog_url)
    with closing(Catalog(empty_catalog_url)) as catalog:
        assert catalog.replicas.all() == []


@pytest.mark.parametrize(
    "file", [f for f in sorted(MIGRATIONS.glob("0*.py")) if f.name[:4] > FIRST_SHARED], ids=lambda f: f.name
)
def test_a_migration_only_adds_so_that_the_version_before_goes_on(file: Path) -> None:
    """A column that must be filled, or one that goes, would stop the engines that are not upgraded yet."""
    for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "op":
            assert call.func.attr in ADDITIVE, f"{file.name}:{call.lineno}"
            if call.func.attr == "add_column":
                text = ast.unparse(call)
                assert "nullable=False" not in text or "server_default" in text, f"{file.name}:{call.lineno}"
                assert "unique=True" not in text, f"{file.name}:{call.lineno}"
            if call.func.attr == "create_index":
                assert "unique=True" not in ast.unparse(call), f"{file.name}:{call.lineno}"
