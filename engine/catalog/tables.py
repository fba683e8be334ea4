"""The catalog's tables and indexes, most of them by the fields of their dataclasses.

`revision_rows.py` turns rows of `revisions` into dataclasses and back.
"""

from collections.abc import Iterable
from dataclasses import Field, fields
from types import UnionType
from typing import Any, get_args

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    false,
    text,
)

from engine.catalog.records import (
    AliasNote,
    AuditEntry,
    Base,
    Key,
    Lease,
    Notice,
    Policy,
    Release,
    Replica,
    ReplicaLoad,
    Route,
    Tenant,
    Tombstone,
)
from engine.catalog.tinker_records import (
    TinkerCheckpoint,
    TinkerModel,
    TinkerResult,
    TinkerSampler,
    TinkerSession,
)

metadata = MetaData()
# Values of one statement, whose parameters have a limit.
CHUNK = 1000
# Types of a field's columns; all others are JSON.
KINDS: dict[Any, Any] = {str: String, int: Integer, float: Float, bool: Boolean}


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index over the rows that match `where`, for both dialects."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


def rows_of(name: str, kind: type[Any], key: tuple[str, ...], *others: Column[Any] | Index) -> Table:
    """Return the table of a dataclass, with a column for each field in their order.

    `others` are indexes, columns in the place of a field's, and columns before all fields.
    """
    extras = {other.name: other for other in others if isinstance(other, Column)}
    columns = [
        _column(field, key) if field.name not in extras else extras.pop(field.name) for field in fields(kind)
    ]
    return Table(name, metadata, *extras.values(), *columns, *(it for it in others if isinstance(it, Index)))


def _column(field: Field[Any], key: tuple[str, ...]) -> Column[Any]:
    may_lack = isinstance(field.type, UnionType)
    kind = get_args(field.type)[0] if may_lack else field.type
    return Column(field.name, KINDS.get(kind, JSON), primary_key=field.name in key, nullable=may_lack)


def rows_among(
    connection: Connection, query: Select[Any], column: ColumnElement[Any], values: Iterable[Any]
) -> list[Any]:
    """Return a query's rows with one of these values in a column, however many values there are."""
    wanted = list(values)
    chunks = (wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK))
    return [row for chunk in chunks for row in connection.execute(query.where(column.in_(chunk)))]


# One row: the catalog's id, independent of its URL, and the secret of its keyed hashes.
catalog = Table(
    "catalog",
    metadata,
    Column("id", String, primary_key=True),
    Column("secret", String, nullable=False, server_default=""),
)

bases = rows_of("bases", Base, ("digest",), Column("texts", JSON, nullable=False, server_default="[]"))

policies = rows_of("policies", Policy, ("name",))

layouts = Table(
    "layouts", metadata, Column("digest", String, primary_key=True), Column("body", Text, nullable=False)
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
changes = Table("changes", metadata, Column("id", Integer, primary_key=True), Column("policy", String))

routes = rows_of(
    "routes",
    Route,
    ("policy",),
    Column("plain_units", Boolean, nullable=False, server_default=false()),
    Index("routes_newest", "updated_at"),
)

releases = rows_of(
    "releases",
    Release,
    ("id",),
    Column("approved", JSON(none_as_null=True)),
    *(Column(name, JSON, nullable=False, server_default="[]") for name in ("ramp", "approvals", "pauses")),
    Index("releases_newest", "policy", "created_at"),
    # A lock: at most one release of a policy runs.
    partial_index("releases_running", "policy", where="state = 'running'", unique=True),
)

tombstones = rows_of(
    "tombstones",
    Tombstone,
    (),
    Column("id", Integer, primary_key=True),
    partial_index("tombstones_active", "policy", "digest", where="lifted_at IS NULL", unique=True),
)

leases = rows_of("leases", Lease, ("name",))

replicas = rows_of("replicas", Replica, ("id",))

replica_loads = rows_of("replica_loads", ReplicaLoad, ("replica", "policy", "digest"))

keys = rows_of(
    "keys",
    Key,
    ("hash",),
    Column("id", String, nullable=False, server_default=""),
    Column("roles", JSON, nullable=False, server_default="[]"),
    Column("policies", JSON, nullable=False, server_default="[]"),
    Column("limits", JSON, nullable=False, server_default="{}"),
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
    *(Column(name, String, primary_key=True) for name in ("tenant", "key", "policy", "revision", "purpose")),
    *(
        Column(name, BigInteger, nullable=False)
        for name in ("requests", "prompt", "completion", "unknown", "open", "reserved")
    ),
)

# Only tenants with limits or a weight of their own, or that were ever suspended, have a row.
tenants = rows_of("tenants", Tenant, ("name",))

switches = Table(
    "switches", metadata, Column("name", String, primary_key=True), Column("on", Boolean, nullable=False)
)

aliases = rows_of("aliases", AliasNote, ("policy", "alias"))

notices = rows_of(
    "notices",
    Notice,
    ("id",),
    Index("notices_newest", "at"),
    partial_index("notices_unsent", "at", where="sent_at IS NULL"),
)

audit = rows_of("audit", AuditEntry, (), Column("id", Integer, primary_key=True, autoincrement=False))

# The Tinker API's own index. Its checkpoints are named states of the trainer, or revisions.
tinker_sessions = rows_of("tinker_sessions", TinkerSession, ("id",))
tinker_models = rows_of(
    "tinker_models", TinkerModel, ("id",), Index("tinker_models_newest", "tenant", "created_at")
)
tinker_checkpoints = rows_of(
    "tinker_checkpoints",
    TinkerCheckpoint,
    ("model", "kind", "name"),
    Column("bytes", BigInteger),
    Index("tinker_checkpoints_newest", "tenant", "created_at"),
)
tinker_samplers = rows_of("tinker_samplers", TinkerSampler, ("id",))
tinker_results = rows_of(
    "tinker_results", TinkerResult, ("id",), Index("tinker_results_oldest", "created_at")
)
