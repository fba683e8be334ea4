"""The usage log's database: its schema and its migrations."""

from contextlib import closing
from pathlib import Path

from engine.errors import ConfigError
from engine.metering.usage_rows import begin, connect

# Applied in order; `user_version` counts them.
SCHEMA = (
    """
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, gateway TEXT NOT NULL, at REAL NOT NULL,
        tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL, revision TEXT NOT NULL,
        purpose TEXT NOT NULL, reserved INTEGER NOT NULL, state TEXT NOT NULL, status INTEGER,
        prompt INTEGER, completion INTEGER, settled_at REAL
    ) STRICT;
    CREATE TABLE spent (
        subject TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL, reserved INTEGER NOT NULL,
        PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE hours (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL, prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL, unknown INTEGER NOT NULL,
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE drawn (
        subject TEXT NOT NULL, period TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE exported (file TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL) STRICT;
    """,
    # No number of tokens is negative.
    """
    ALTER TABLE requests RENAME TO requests_1;
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, gateway TEXT NOT NULL, at REAL NOT NULL,
        tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL, revision TEXT NOT NULL,
        purpose TEXT NOT NULL, reserved INTEGER NOT NULL CHECK (reserved >= 0), state TEXT NOT NULL,
        status INTEGER, prompt INTEGER CHECK (prompt >= 0), completion INTEGER CHECK (completion >= 0),
        settled_at REAL
    ) STRICT;
    INSERT INTO requests SELECT seq, id, gateway, at, tenant, key, policy, revision, purpose, reserved, state,
        status, max(prompt, 0), max(completion, 0), settled_at FROM requests_1;
    DROP TABLE requests_1;
    ALTER TABLE spent RENAME TO spent_1;
    CREATE TABLE spent (
        subject TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL CHECK (used >= 0),
        reserved INTEGER NOT NULL, PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO spent SELECT subject, period, max(used, 0), reserved FROM spent_1;
    DROP TABLE spent_1;
    ALTER TABLE hours RENAME TO hours_1;
    CREATE TABLE hours (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL,
        prompt INTEGER NOT NULL CHECK (prompt >= 0), completion INTEGER NOT NULL CHECK (completion >= 0),
        unknown INTEGER NOT NULL CHECK (unknown >= 0),
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO hours SELECT hour, tenant, key, policy, revision, purpose, requests, max(prompt, 0),
        max(completion, 0), max(unknown, 0) FROM hours_1;
    DROP TABLE hours_1;
    """,
    # What the catalog that machines share has of this log: the rows that may still change, from an hour on.
    """
    CREATE TABLE log (id TEXT NOT NULL, turn INTEGER NOT NULL, since INTEGER NOT NULL) STRICT;
    INSERT INTO log VALUES (lower(hex(randomblob(16))), 0, 0);
    CREATE TABLE copied (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL, prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL, unknown INTEGER NOT NULL, open INTEGER NOT NULL,
        reserved INTEGER NOT NULL,
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
    ALTER TABLE requests ADD COLUMN repeated INTEGER NOT NULL DEFAULT 0;
    """,
)


def create(path: Path) -> None:
    """Create the database or migrate it to the newest schema; readable by its owner alone.

    Raises `ConfigError` for one that a newer version has written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        path.touch(mode=0o600)
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        with begin(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(SCHEMA):
                raise ConfigError(
                    f"{path} has schema {version}, and this version of Graftwork knows {len(SCHEMA)}. "
                    "Use the newer version, or set another state_dir."
                )
            for script in SCHEMA[version:]:
                for statement in filter(str.strip, script.split(";")):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version={len(SCHEMA)}")
