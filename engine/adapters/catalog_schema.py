"""The catalog's rows and tables.

Knows one frozen dataclass and one table for each kind of row, field for column, and the schema
version that they stand for. Knows no query. Times are seconds since the epoch; a digest of None is
the base itself.
"""

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import JSON, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text, text

# The newest file of engine/adapters/migrations/versions.
SCHEMA_VERSION = "0002"


@dataclass(frozen=True)
class Base:
    digest: str
    name: str
    path: str
    created_at: float


@dataclass(frozen=True)
class Policy:
    name: str
    base: str
    config: dict[str, Any]
    owner: str
    created_at: float


@dataclass(frozen=True)
class Revision:
    """One immutable adapter; (segment, offset, length) is where its packed bytes lie in the store.

    `state` is `snapshot` (a single step, removed after `expires_at`) or `exported`. `probe` is the
    result of the effect probe, None until it has run.
    """

    policy: str
    digest: str
    base: str
    parent: str | None
    step: int
    rank: int
    bytes: int
    layout: str
    segment: str
    offset: int
    length: int
    checksum: str
    state: str
    owner: str
    created_at: float
    expires_at: float | None = None
    probe: dict[str, Any] | None = None


@dataclass(frozen=True)
class Route:
    """What a policy's bare name means now. `weight` is the share of units on the canary."""

    policy: str
    champion: str | None = None
    previous: str | None = None
    canary: str | None = None
    weight: float = 0.0
    salt: str = ""
    version: int = 0
    updated_at: float = 0.0


@dataclass(frozen=True)
class Release:
    """One attempt to make `revision` the champion, judged against `baseline` (None: the base).

    `step` is `probe`, `score`, `approval`, `canary` or `done`; `state` is `running`, `promoted`,
    `rolled_back` or `held`. `skip_gates` maps a gate to {"by", "reason"}; `settings` is a `ReleaseConfig`;
    `approval` is who ended it, if a person did; `evidence` is what its verdict was based on;
    `approved` is {"by", "reason", "at"} once a person has let it go to users.
    """

    id: str
    policy: str
    revision: str
    baseline: str | None
    step: str
    weight: float
    state: str
    settings: dict[str, Any]
    created_at: float
    updated_at: float
    approval: str | None = None
    reason: str = ""
    version: int = 0
    canary_started_at: float | None = None
    skip_gates: dict[str, dict[str, str]] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    approved: dict[str, Any] | None = None


@dataclass(frozen=True)
class AliasNote:
    """What the controller last wrote or accepted for an alias in MLflow; a version of None: no alias.

    An alias in the registry that differs from its note is a person's move.
    """

    policy: str
    alias: str
    version: str | None
    digest: str | None
    at: float


@dataclass(frozen=True)
class Notice:
    """Something that people or automations want to hear of, kept until it is sent.

    `name` is `graftwork.release.promoted` and the like; `id` follows from what happened, so that
    saying it twice is harmless. `sent_at` is None until Prefect's server has taken it.
    """

    id: str
    name: str
    policy: str
    revision: str | None
    reason: str
    link: str
    at: float
    sent_at: float | None = None


@dataclass(frozen=True)
class Tombstone:
    """A revision that nobody is served, stronger than any alias, until a named person lifts it."""

    policy: str
    digest: str
    reason: str
    by: str
    at: float
    lifted_by: str | None = None
    lifted_at: float | None = None
    lifted_reason: str | None = None


@dataclass(frozen=True)
class Lease:
    name: str
    holder: str
    until: float
    fence: int


@dataclass(frozen=True)
class Key:
    """An API key by its sha256; `scope` is `admin`, `user` or `score`."""

    hash: str
    owner: str
    scope: str
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True)
class ServingState:
    """All that a gateway needs to route: read in one transaction.

    `reasons` says why each (policy, digest) of `tombstones` is buried; `keys` holds the keys in
    force by their hash.
    """

    routes: dict[str, Route]
    tombstones: frozenset[tuple[str, str]]
    reasons: dict[tuple[str, str], str]
    keys: dict[str, Key]


metadata = MetaData()

bases = Table(
    "bases",
    metadata,
    Column("digest", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("path", String, nullable=False),
    Column("created_at", Float, nullable=False),
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

# Without a row id the primary key is the table: one lookup finds the row, also by digest prefix.
revisions = Table(
    "revisions",
    metadata,
    Column("policy", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("base", String, nullable=False),
    Column("parent", String),
    Column("step", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("layout", String, nullable=False),
    Column("segment", String, nullable=False),
    Column("offset", Integer, nullable=False),
    Column("length", Integer, nullable=False),
    Column("checksum", String, nullable=False),
    Column("state", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("probe", JSON(none_as_null=True)),
    Index("revisions_newest", "policy", "created_at", "digest"),
    Index("revisions_expiring", "expires_at", sqlite_where=text("expires_at IS NOT NULL")),
    sqlite_with_rowid=False,
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
    Index("releases_newest", "policy", "created_at"),
    # The lock of a policy: at most one release of it runs.
    Index("releases_running", "policy", unique=True, sqlite_where=text("state = 'running'")),
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
    Index("tombstones_active", "policy", "digest", unique=True, sqlite_where=text("lifted_at IS NULL")),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("until", Float, nullable=False),
    Column("fence", Integer, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("hash", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
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
    Index("notices_unsent", "at", sqlite_where=text("sent_at IS NULL")),
)
