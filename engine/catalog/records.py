"""The catalog's rows: a frozen dataclass for each table, field for column, and their schema version.

Those of the Tinker API are in tinker.py. Times are seconds since the epoch; a digest of None is the base
itself.
"""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from engine.base.text_files import text_digest
from engine.errors import Forbidden
from engine.settings.params import DIGEST12

# That of engine/catalog/tables.py, the oldest one that migration.py brings to it, and the oldest one whose
# code may use it: what came since has only added tables and columns, which that code leaves alone.
SCHEMA_VERSION, OLDEST_SCHEMA, USABLE_SINCE = "0016", "0010", "0016"
# Values of `Revision.state`; a row holds the index.
STATES = ("snapshot", "exported")
# A release's verdicts, each with its final state; and the reverse.
ENDS = {"promote": "promoted", "rollback": "rolled_back", "hold": "held"}
VERDICTS = {state: verdict for verdict, state in ENDS.items()}
# Tinker's SDK accepts only keys that begin like this; any key may be written so.
OURS, TINKERS = "gw-", "tml-"
# Names that are put together or taken apart at each request.
NAMES = 8192


@dataclass(frozen=True)
class Base:
    """A frozen model that policies are trained on; `path` is its directory.

    `texts` are the files that its text digest covers, each with its sha256: first those it was met with, then
    those that were accepted in their place. The last are in force; there are none while they are not known.
    """

    digest: str
    name: str
    path: str
    created_at: float
    texts: list[dict[str, str]] = field(default_factory=list)

    @property
    def text_digests(self) -> list[str]:
        """Return the digests of `texts`."""
        return [text_digest(files) for files in self.texts]


@dataclass(frozen=True)
class Policy:
    """A named line of training on one base; `config` holds its own settings."""

    name: str
    base: str
    config: dict[str, Any]
    owner: str
    created_at: float


@dataclass(frozen=True)
class Revision:
    """One immutable adapter; (segment, offset, length) is where its packed bytes lie in the store.

    `state` is `snapshot` (of a single step, removed after `expires_at`) or `exported`. `probe` is the
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
    retired_at: float | None = None
    retired_by: str | None = None
    retired_reason: str | None = None


@dataclass(frozen=True)
class Route:
    """The revisions that a policy's bare name is served by. `weight` is the canary's share of units.

    `plain_units`: its release began with the unit hashes of an older version, and keeps them.
    """

    policy: str
    champion: str | None = None
    previous: str | None = None
    canary: str | None = None
    weight: float = 0.0
    salt: str = ""
    version: int = 0
    updated_at: float = 0.0
    plain_units: bool = False


@dataclass(frozen=True)
class Release:
    """One attempt to make `revision` the champion, judged against `baseline` (None: the base).

    `step` is `probe`, `score`, `shadow`, `approval`, `canary` or `done`; `state` is `running`, `promoted`,
    `rolled_back` or `held`. `skip_gates` maps a gate to {"by", "reason"}; `settings` is a `ReleaseConfig`;
    `approval` is who ended it, if a person did; `evidence` is what its verdict was based on;
    `approved` is {"by", "reason", "at"} once a person has approved it for users. `canary_version` is the
    route's version at the canary's start. `ramp` has [version of the route, weight] of each step of the
    canary so far; a canary that started before this was recorded has none, and one step. `approvals` are
    those of its steps: {"weight", "asked_at"}, and once given what `approved` has. `pauses` are {"by",
    "reason", "at"}, and once over {"resumed_by", "resumed_for", "resumed_at"}. `updated_at` is when it last
    advanced.
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
    canary_version: int | None = None
    ramp: list[list[float]] = field(default_factory=list)
    approvals: list[dict[str, Any]] = field(default_factory=list)
    pauses: list[dict[str, Any]] = field(default_factory=list)

    @property
    def paused(self) -> dict[str, Any] | None:
        """The pause that lasts, or None."""
        is_open = self.state == "running" and self.pauses and "resumed_at" not in self.pauses[-1]
        return self.pauses[-1] if is_open else None

    @property
    def asked(self) -> dict[str, Any] | None:
        """The approval of a step that is waited for, or None."""
        is_open = self.state == "running" and self.approvals and "by" not in self.approvals[-1]
        return self.approvals[-1] if is_open else None

    @property
    def asks(self) -> float | None:
        """The weight whose approval it waits for, or None."""
        if self.asked:
            return float(self.asked["weight"])
        is_there = self.state == "running" and self.step == "approval" and not self.approved
        return self.weight if is_there and self.settings.get("approval_s") else None

    def stopped_s(self, since: float, now: float, is_asking: bool = False) -> float:
        """Return for how many of the seconds between two times it was paused.

        The time in which it waited for the approval of a step is as a pause to all but that approval's own
        limit (`is_asking`).
        """
        stops = [(one["at"], one.get("resumed_at", now)) for one in self.pauses]
        if not is_asking:
            stops += [(one["asked_at"], one.get("at", now)) for one in self.approvals]
        stopped, until = 0.0, since
        for begin, end in sorted(stops):
            stopped += max(0.0, min(end, now) - max(begin, until))
            until = max(until, end)
        return stopped


@dataclass(frozen=True)
class AliasNote:
    """What the controller last wrote or accepted for an MLflow alias; a `version` of None: no alias.

    An alias in the registry that differs from its note was moved by a person.
    """

    policy: str
    alias: str
    version: str | None
    digest: str | None
    at: float


@dataclass(frozen=True)
class Notice:
    """A notice for people and automations, kept until it is sent.

    `name` is `graftwork.release.promoted` and the like; `id` is derived from the event, so that adding it
    twice is harmless. `sent_at` is None until Prefect's server has accepted it.
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
    """A rolled-back revision: not served, whatever route or alias say, until a named person lifts it."""

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
    """A named lock, held until a time; `fence` grows with each acquisition (a fencing token)."""

    name: str
    holder: str
    until: float
    fence: int


@dataclass(frozen=True)
class Replica:
    """An engine of this catalog: its address, the base's digest, Graftwork's version, and its start's own id.

    `beats` grows while it runs; `at` (epoch seconds) is its own clock's. `draining`: it takes no new users.
    """

    id: str
    url: str
    base: str
    version: str
    incarnation: str
    beats: int
    at: float
    draining: bool


@dataclass(frozen=True)
class ReplicaLoad:
    """What came of a replica's load of a revision under release: None, or why it failed."""

    replica: str
    policy: str
    digest: str
    fault: str | None


@dataclass(frozen=True)
class Key:
    """An API key by its sha256. `owner` is its tenant; `id` stays the same when the key is rotated.

    `policies` are names and prefixes (`acme-*`) that it may use; none: every policy. `limits` are fields of
    `Limits`.
    """

    hash: str
    owner: str
    created_at: float
    revoked_at: float | None = None
    id: str = ""
    roles: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    expires_at: float | None = None

    def may(self, *roles: str) -> bool:
        """Return whether the key has one of these roles; `admin` has every role."""
        return "admin" in self.roles or not set(roles).isdisjoint(self.roles)

    def sees(self, policy: str) -> bool:
        """Return whether the key may use the policy of this name, whether it exists or not."""
        return not self.policies or any(covers(pattern, policy) for pattern in self.policies)

    @property
    def names(self) -> tuple[str, str]:
        """Return what names this key in answers' ids and in the ledger: its id, formerly its hash.

        The id stays when the key is rotated.
        """
        return self.id, self.hash

    def is_in_force(self, now: float) -> bool:
        """Return whether it is neither revoked nor expired at this time (epoch seconds)."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class Tenant:
    """Limits that all keys of a tenant share, and its weight where the engine is full.

    A suspended tenant's requests are refused, since `suspended_at` (epoch seconds) and for this reason.
    """

    name: str
    limits: dict[str, float] = field(default_factory=dict)
    weight: float = 1.0
    suspended_at: float | None = None
    suspended_for: str | None = None

    def refuse_suspended(self) -> None:
        """Raise `Forbidden` where the tenant is suspended."""
        if self.suspended_at is not None:
            raise Forbidden(f"Your access is suspended: {self.suspended_for} Ask whoever runs this service.")


@lru_cache(NAMES)
def served_name(policy: str, digest: str) -> str:
    """Return `policy@digest12`, the name by which vLLM serves the adapter."""
    return f"{policy}@{digest[:DIGEST12]}"


@lru_cache(NAMES)
def split_served_name(name: str) -> tuple[str, str | None]:
    """Split `policy@digest` into policy and digest prefix; the prefix is None for a bare policy."""
    policy, at, digest = name.partition("@")
    return policy, digest if at else None


def hash_key(plaintext: str) -> str:
    """Return the sha256 of a key's plaintext, in hex; `tml-` at its beginning is read as `gw-`."""
    if plaintext.startswith(TINKERS):
        plaintext = OURS + plaintext.removeprefix(TINKERS)
    return hashlib.sha256(plaintext.encode()).hexdigest()


def covers(pattern: str, policy: str) -> bool:
    """Return whether a pattern, a name or a prefix with `*` at its end, covers a policy's name."""
    return policy.startswith(pattern[:-1]) if pattern.endswith("*") else policy == pattern


def overlap(one: str, other: str) -> bool:
    """Return whether some name is covered by both patterns."""
    return covers(one, other.removesuffix("*")) or covers(other, one.removesuffix("*"))


@dataclass(frozen=True)
class AuditEntry:
    """One change: who made it, on whose behalf, and the values before and after as JSON.

    `hash` covers the entry and the hash of the one before.
    """

    id: int
    at: float
    actor: str
    on_behalf_of: str | None
    action: str
    subject: str
    before: str
    after: str
    hash: str
