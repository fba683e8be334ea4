"""The usage log's database: its schema, and the step from the version before."""

from contextlib import closing
from pathlib import Path

from engine.errors import ConfigError
from engine.file_lock import alone_in
from engine.metering.usage_rows import begin, connect

VERSION = 4
# No number of tokens is negative.
COUNTED = """
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, gateway TEXT NOT NULL, at REAL NOT NULL,
        tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL, revision TEXT NOT NULL,
        purpose TEXT NOT NULL, reserved INTEGER NOT NULL CHECK (reserved >= 0), state TEXT NOT NULL,
        status INTEGER, prompt INTEGER CHECK (prompt >= 0), completion INTEGER CHECK (completion >= 0),
        settled_at REAL, repeated INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE spent (
        subject TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL CHECK (used >= 0),
        reserved INTEGER NOT NULL, PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE hours (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL,
        prompt INTEGER NOT NULL CHECK (prompt >= 0), completion INTEGER NOT NULL CHECK (completion >= 0),
        unknown INTEGER NOT NULL CHECK (unknown >= 0),
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
"""
OTHERS = """
    CREATE TABLE drawn (
        subject TEXT NOT NULL, period TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE exported (file TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL) STRICT;
"""
# What the catalog that machines share has of this log: the rows that may still change, from an hour on.
SHARED = """
    CREATE TABLE log (id TEXT NOT NULL, turn INTEGER NOT NULL, since INTEGER NOT NULL) STRICT;
    INSERT INTO log VALUES (lower(hex(randomblob(16))), 0, 0);
    CREATE TABLE copied (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL, prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL, unknown INTEGER NOT NULL, open INTEGER NOT NULL,
        reserved INTEGER NOT NULL,
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
"""
# What gateways hold of budgets, and the last line of each one's journal that is written here.
HELD = """
    CREATE TABLE gateways (gateway TEXT PRIMARY KEY, written INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE held (
        gateway TEXT NOT NULL, subject TEXT NOT NULL, period TEXT NOT NULL, tokens INTEGER NOT NULL,
        PRIMARY KEY (gateway, subject, period)
    ) STRICT, WITHOUT ROWID;
"""
# Version 1, which commit 265b009 has, lacks the checks, `repeated` and what is shared; version 3 lacks what
# HELD has.
SET_ASIDE = """
    ALTER TABLE requests RENAME TO old_requests;
    ALTER TABLE spent RENAME TO old_spent;
    ALTER TABLE hours RENAME TO old_hours;
"""
CARRY_OVER = """
    INSERT INTO requests SELECT seq, id, gateway, at, tenant, key, policy, revision, purpose, reserved, state,
        status, max(prompt, 0), max(completion, 0), settled_at, 0 FROM old_requests;
    INSERT INTO spent SELECT subject, period, max(used, 0), reserved FROM old_spent;
    INSERT INTO hours SELECT hour, tenant, key, policy, revision, purpose, requests, max(prompt, 0),
        max(completion, 0), max(unknown, 0) FROM old_hours;
    DROP TABLE old_requests;
    DROP TABLE old_spent;
    DROP TABLE old_hours;
"""


def create(path: Path) -> None:
    """Create the database or migrate it to the newest schema; readable by its owner alone.

    Raises `ConfigError` for one that a newer version has written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        path.touch(mode=0o600)
    # SQLite refuses at once to change the mode of a file that another process uses, however long it may wait.
    with alone_in(path.parent, waits=True), closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        with begin(connection):
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema > VERSION:
                raise ConfigError(
                    f"{path} has schema {schema}, and this version of Graftwork knows {VERSION}. "
                    "Use the newer version, or set another state_dir."
                )
            if schema == VERSION:
                return
            script = HELD
            if schema < 3:
                script += (SET_ASIDE + COUNTED + CARRY_OVER if schema else COUNTED + OTHERS) + SHARED
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={VERSION}")
