"""The catalog's schema: how a new database gets it, and one of an older version."""

import secrets
import uuid
from typing import Any

from sqlalchemy import Connection, Row, inspect

from engine.catalog import tables
from engine.catalog.access import is_usable, schema_fault, schema_of
from engine.catalog.records import OLDEST_SCHEMA, SCHEMA_VERSION, USABLE_SINCE
from engine.errors import ConfigError

SAID = "entries of the audit log are never changed"
# What a new database has beside the tables.
BESIDE = {
    "postgresql": (
        # Byte order, as in SQLite, so that names with one prefix are a range.
        'ALTER TABLE policies ALTER COLUMN name TYPE VARCHAR COLLATE "C"',
        f"CREATE FUNCTION audit_is_final() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{SAID}'; END $$",
        "CREATE TRIGGER audit_is_final BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "EXECUTE FUNCTION audit_is_final()",
    ),
    "sqlite": tuple(
        f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit "
        f"BEGIN SELECT RAISE(ABORT, '{SAID}'); END"
        for change in ("UPDATE", "DELETE")
    ),
}
VERSIONS = (
    "CREATE TABLE alembic_version "
    "(version_num VARCHAR(32) NOT NULL, usable_since VARCHAR(32), "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)
# What a version adds to tables that the one before has. New tables come from `tables` and need no line.
ADDED = {
    "0013": (
        "ALTER TABLE tenants ADD COLUMN suspended_at FLOAT",
        "ALTER TABLE tenants ADD COLUMN suspended_for VARCHAR",
    ),
    "0014": ("ALTER TABLE bases ADD COLUMN texts JSON DEFAULT '[]' NOT NULL",),
    "0015": (
        "ALTER TABLE releases ADD COLUMN approvals JSON DEFAULT '[]' NOT NULL",
        "ALTER TABLE releases ADD COLUMN pauses JSON DEFAULT '[]' NOT NULL",
    ),
    "0016": ("ALTER TABLE alembic_version ADD COLUMN usable_since VARCHAR(32)",),
}


def upgrade(connection: Connection, migrates: bool = True) -> None:
    """Create the tables or bring them to the newest schema, in a write transaction of the caller.

    A newer schema that this code may use stays as it is, and so does an older one unless this `migrates`.
    Raises `ConfigError` for another newer one, or one that is too old for this step.
    """
    row = _schema_row(connection)
    if row is None:
        _create(connection)
        return
    database_version, since = schema_of(row)
    if is_usable(database_version, since):
        return
    if database_version > SCHEMA_VERSION or database_version < OLDEST_SCHEMA:
        raise ConfigError(schema_fault(str(connection.engine.url.database), database_version))
    if migrates:
        tables.metadata.create_all(connection)
        for version in sorted(ADDED):
            if version > database_version:
                _execute(connection, ADDED[version])
        marks = f"version_num = '{SCHEMA_VERSION}', usable_since = '{USABLE_SINCE}'"
        connection.exec_driver_sql(f"UPDATE alembic_version SET {marks}")


def _schema_row(connection: Connection) -> Row[Any] | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.exec_driver_sql("SELECT * FROM alembic_version").first()


def _create(connection: Connection) -> None:
    # In a database with other tables of these names this fails, and nothing was changed.
    tables.metadata.create_all(connection, checkfirst=False)
    _execute(connection, BESIDE[connection.dialect.name])
    identity = {"id": uuid.uuid4().hex, "secret": secrets.token_hex(32)}
    connection.execute(tables.catalog.insert(), identity)
    marks = f"'{SCHEMA_VERSION}', '{USABLE_SINCE}'"
    _execute(connection, (VERSIONS, f"INSERT INTO alembic_version VALUES ({marks})"))


def _execute(connection: Connection, statements: tuple[str, ...]) -> None:
    for statement in statements:
        connection.exec_driver_sql(statement)
