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
PRAGMA user_version = 1;
