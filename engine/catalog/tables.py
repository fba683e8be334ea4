"""The catalog's tables and indexes; `revision_rows.py` makes dataclasses of rows of `revisions`, and back."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    false,
    text,
)

metadata = MetaData()


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index over the rows that match `where`, for both dialects."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


# One row: the catalog's id, independent of its URL, and the secret of its keyed hashes.
catalog = Table(
    "catalog",
    metadata,
    Column("id", String, primary_key=True),
    Column("secret", String, nullable=False, server_default=""),
)

bases = Table(
    "bases",
    metadata,
    Column("digest", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("path", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("texts", JSON, nullable=False, server_default="[]"),
)

policies = Table(
    "policies",
    metadata,
    Column("name", String, primary_key=True),
    Column("base", String, nullable=False),
    Column("config", JSON, nullable=False),
    Column("owner", String, nullable=False),
    Column("created_at", Float, nullable=False),
)

layouts = Table(
    "layouts",
    metadata,
    Column("digest", String, primary_key=True),
    Column("body", Text, nullable=False),
)

# Interned strings that many revisions share: digests of bases and layouts, segments, owners.
# Rows are only ever added, so that every process may cache them.
names = Table(
    "names",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
)

# Digests and checksums are 32 bytes; base, layout, segment and owner are ids of `names`; state is an
# index of `STATES`. Rows lie in insertion order: digests are random, so that in their order each new row
# would change a page of its own. Only one narrow index is in that order, the key of a revision.
revisions = Table(
    "revisions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("policy", String, nullable=False),
    Column("base", Integer, nullable=False),
    Column("parent", LargeBinary),
    Column("step", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("layout", Integer, nullable=False),
    Column("segment", Integer, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("owner", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("probe", JSON(none_as_null=True)),
    Column("retired_at", Float),
    Column("retired_by", String),
    Column("retired_reason", String),
    Index("revisions_key", "digest", "policy", unique=True),
    Index("revisions_newest", "policy", "created_at", "id"),
    partial_index("revisions_expiring", "expires_at", where="expires_at IS NOT NULL"),
    partial_index("revisions_children", "parent", "policy", where="parent IS NOT NULL"),
)

# Revisions whose bytes fail their checksum; they are not loaded until whole bytes are there.
quarantine = Table(
    "quarantine",
    metadata,
    Column("policy", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("reason", String, nullable=False),
    Column("at", Float, nullable=False),
)

# Names of purged policies.
purged = Table(
    "purged",
    metadata,
    Column("policy", String, primary_key=True),
    Column("by", String, nullable=False),
    Column("at", Float, nullable=False),
)

# The change feed of gateways, in the order of commits; only the newest rows are kept. A policy of None stands
# for the keys.
changes = Table(
    "changes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("policy", String),
)

routes = Table(
    "routes",
    metadata,
    Column("policy", String, primary_key=True),
    Column("champion", String),
    Column("previous", String),
    Column("canary", String),
    Column("weight", Float, nullable=False),
    Column("salt", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("updated_at", Float, nullable=False),
    # Whether a release runs that began with unit hashes of an older version.
    Column("plain_units", Boolean, nullable=False, server_default=false()),
    Index("routes_newest", "updated_at"),
)

releases = Table(
    "releases",
    metadata,
    Column("id", String, primary_key=True),
    Column("policy", String, nullable=False),
    Column("revision", String, nullable=False),
    Column("baseline", String),
    Column("step", String, nullable=False),
    Column("weight", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("approval", String),
    Column("reason", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("canary_started_at", Float),
    Column("skip_gates", JSON, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("approved", JSON(none_as_null=True)),
    Column("canary_version", Integer),
    Column("ramp", JSON, nullable=False, server_default="[]"),
    Index("releases_newest", "policy", "created_at"),
    # A lock: at most one release of a policy runs.
    partial_index("releases_running", "policy", where="state = 'running'", unique=True),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("policy", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("by", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("lifted_by", String),
    Column("lifted_at", Float),
    Column("lifted_reason", String),
    partial_index("tombstones_active", "policy", "digest", where="lifted_at IS NULL", unique=True),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("until", Float, nullable=False),
    Column("fence", Integer, nullable=False),
)

replicas = Table(
    "replicas",
    metadata,
    Column("id", String, primary_key=True),
    Column("url", String, nullable=False),
    Column("base", String, nullable=False),
    Column("version", String, nullable=False),
    Column("incarnation", String, nullable=False),
    Column("beats", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("draining", Boolean, nullable=False),
)

replica_loads = Table(
    "replica_loads",
    metadata,
    Column("replica", String, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("fault", String),
)

keys = Table(
    "keys",
    metadata,
    Column("hash", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("id", String, nullable=False, server_default=""),
    Column("roles", JSON, nullable=False, server_default="[]"),
    Column("policies", JSON, nullable=False, server_default="[]"),
    Column("limits", JSON, nullable=False, server_default="{}"),
    Column("expires_at", Float),
)

# Tokens that machines have drawn of budgets, where they share a catalog.
budgets = Table(
    "budgets",
    metadata,
    Column("subject", String, primary_key=True),
    Column("period", String, primary_key=True),
    Column("drawn", BigInteger, nullable=False),
)

# Each machine's usage log, as it was last copied, and when it was last heard of (this server's clock).
usage_logs = Table(
    "usage_logs",
    metadata,
    Column("id", String, primary_key=True),
    Column("turn", BigInteger, nullable=False),
    Column("seen_at", Float, nullable=False),
)

usage_hours = Table(
    "usage_hours",
    metadata,
    Column("log", String, primary_key=True),
    Column("hour", Integer, primary_key=True, autoincrement=False),
    Column("tenant", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("policy", String, primary_key=True),
    Column("revision", String, primary_key=True),
    Column("purpose", String, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("unknown", BigInteger, nullable=False),
    Column("open", BigInteger, nullable=False),
    Column("reserved", BigInteger, nullable=False),
)

# Only tenants with limits or a weight of their own, or that were ever suspended, have a row.
tenants = Table(
    "tenants",
    metadata,
    Column("name", String, primary_key=True),
    Column("limits", JSON, nullable=False),
    Column("weight", Float, nullable=False),
    Column("suspended_at", Float),
    Column("suspended_for", String),
)

switches = Table(
    "switches",
    metadata,
    Column("name", String, primary_key=True),
    Column("on", Boolean, nullable=False),
)

aliases = Table(
    "aliases",
    metadata,
    Column("policy", String, primary_key=True),
    Column("alias", String, primary_key=True),
    Column("version", String),
    Column("digest", String),
    Column("at", Float, nullable=False),
)

notices = Table(
    "notices",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("revision", String),
    Column("reason", String, nullable=False),
    Column("link", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("sent_at", Float),
    Index("notices_newest", "at"),
    partial_index("notices_unsent", "at", where="sent_at IS NULL"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("actor", String, nullable=False),
    Column("on_behalf_of", String),
    Column("action", String, nullable=False),
    Column("subject", String, nullable=False),
    Column("before", String, nullable=False),
    Column("after", String, nullable=False),
    Column("hash", String, nullable=False),
)

# The Tinker API's own index. Its checkpoints are named states of the trainer, or revisions.
tinker_sessions = Table(
    "tinker_sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("finished", String),
)

tinker_models = Table(
    "tinker_models",
    metadata,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("targets", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("next_seq", Integer, nullable=False),
    Column("gathered", Integer, nullable=False),
    Column("corrupted", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
    Index("tinker_models_newest", "tenant", "created_at"),
)

tinker_checkpoints = Table(
    "tinker_checkpoints",
    metadata,
    Column("model", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("stored", String, nullable=False),
    Column("bytes", BigInteger),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Index("tinker_checkpoints_newest", "tenant", "created_at"),
)

tinker_samplers = Table(
    "tinker_samplers",
    metadata,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("served", String, nullable=False),
    Column("path", String),
    Column("created_at", Float, nullable=False),
)

tinker_results = Table(
    "tinker_results",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("body", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("tinker_results_oldest", "created_at"),
)
