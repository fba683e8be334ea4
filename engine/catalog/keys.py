"""API keys and tenants. A key's plaintext is returned once, when it is created; only its sha256 is stored.

A tenant is a key's `owner`. Its keys may be limited to policies by patterns; patterns of two tenants never
overlap, and a policy within a tenant's patterns belongs to that tenant.
"""

import math
import re
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select, true, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell
from engine.catalog.records import OURS, TINKERS, Key, Policy, Tenant, hash_key, overlap
from engine.clocks import SteadyClock
from engine.errors import ConfigError, Conflict, NotFound
from engine.files import replacing

ROLES = ("infer", "pin", "feedback", "score", "train", "release", "metrics", "admin")
# The owner of the installation's own key.
LOCAL = "local"
# Names for sets of roles.
SCOPES = {
    "user": ("infer", "feedback"),
    "score": ("infer", "pin", "score"),
    "tinker": ("infer", "pin", "train"),
    "admin": ("admin",),
}
# Digits of a key's hash by which people name it.
SHOWN = 12
PATTERN = re.compile(r"[a-z][a-z0-9-]{0,62}\*?")


@dataclass(frozen=True)
class Limits:
    """Limits of a key or a tenant; None: no limit.

    `load_share` is a share of the engine's queue of cold loads, `concurrency` counts requests under way.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: float | None = None
    load_share: float | None = None
    tokens_per_day: float | None = None
    tokens_per_month: float | None = None


class Keys:
    """The catalog's keys; `catalog.keys`."""

    def __init__(self, access: Access):
        self._access = access
        # Of one clock, so that one that jumps ahead ends no key.
        self.now = SteadyClock()

    def create(
        self,
        owner: str,
        roles: str | Iterable[str],
        policies: Sequence[str] = (),
        limits: dict[str, float] | None = None,
        expires_at: float | None = None,
    ) -> str:
        """Return a new key's plaintext. `roles` are of `ROLES`, or one name of `SCOPES`.

        Raises `ConfigError` for an unknown role, pattern or limit, and `Conflict` when `policies` overlap
        with another tenant's.
        """
        key = Key(
            hash="",
            owner=owner,
            created_at=time.time(),
            roles=roles_of(roles),
            policies=[*policies],
            limits=checked_limits(limits or {}),
            expires_at=expires_at,
        )
        refuse_patterns(key.policies)
        plaintext, row = fresh(key)
        with self._access.write() as connection:
            self._add(connection, row)
            self._access.record(connection, "key.create", row.id, None, shown(row))
        return plaintext

    def _add(self, connection: Connection, row: Key) -> None:
        refuse_overlap(connection, row)
        connection.execute(self._access.new(tables.keys, row))
        tell(connection, None)

    def ensure_local(self, path: Path) -> str:
        """Return the installation's own admin key, kept in `path` for its owner only.

        A key that was revoked, or belongs to another catalog, is replaced.
        """
        if path.is_file():
            plaintext = path.read_text().strip()
            if self.find(plaintext):
                return plaintext
        plaintext = self.create(LOCAL, "admin")
        with replacing(path) as draft:
            draft.touch(mode=0o600)
            draft.write_text(plaintext + "\n")
        return plaintext

    def all(self) -> list[Key]:
        """Return the keys, revoked ones too, oldest first."""
        return self._access.all(Key, select(tables.keys).order_by(tables.keys.c.created_at))

    def find(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext; None when there is none."""
        return self.find_hash(hash_key(plaintext))

    def find_hash(self, hashed: str) -> Key | None:
        """Return the key in force whose plaintext has this hash; None when there is none."""
        # Most keys that a gateway does not know are bad ones, and they may be many.
        if not self._access.quick(f"SELECT 1 FROM keys WHERE hash = {self._access.mark}", (hashed,)):
            return None
        key = self._access.one(Key, select(tables.keys).where(tables.keys.c.hash == hashed))
        return key if key is not None and key.is_in_force(self.now()) else None

    def match(self, prefix: str) -> list[Key]:
        """Return the key in force whose id or hash starts with `prefix`, or whose plaintext it is.

        After a rotation these are two rows, the newest first. Raises `NotFound` when there is none,
        `Conflict` when there are several keys.
        """
        whole = hash_key(prefix) if prefix.startswith((OURS, TINKERS)) else None
        now = self.now()
        keys = [
            key
            for key in reversed(self.all())
            if key.is_in_force(now)
            and (key.hash == whole if whole else key.id.startswith(prefix) or key.hash.startswith(prefix))
        ]
        if not keys:
            raise NotFound(f"No key in force begins with {prefix[:12]!r}. `graftwork key ls` lists them.")
        if len({key.id for key in keys}) > 1:
            raise Conflict(f"{len(keys)} keys begin with {prefix!r}; give more of its characters.")
        return keys

    def revoke(self, prefix: str) -> Key:
        """Revoke the key that `match` finds, with its rotated ones; return it. Raises as `match`."""
        key = self.match(prefix)[0]
        self._revoke(tables.keys.c.id == key.id)
        return key

    def revoke_all(self) -> int:
        """Revoke every key, those that have expired too; return how many there were, by their ids."""
        return self._revoke(true())

    def _revoke(self, which: ColumnElement[bool]) -> int:
        now, column = time.time(), tables.keys.c
        with self._access.write() as connection:
            there = column.revoked_at.is_(None) & which
            query = select(column.id).where(there).distinct().order_by(column.id)
            ids = connection.execute(query).scalars().all()
            connection.execute(update(tables.keys).where(there).values(revoked_at=now))
            for key in ids:
                self._access.record(connection, "key.revoke", key, {"revoked_at": None}, {"revoked_at": now})
            tell(connection, None)
        return len(ids)

    def rotate(self, prefix: str, overlap_s: float) -> str:
        """Return the plaintext of a new key with the same id, rights and limits.

        The old one is in force for another `overlap_s`. Raises as `match`.
        """
        keys, now = self.match(prefix), time.time()
        plaintext, row = fresh(replace(keys[0], created_at=now))
        with self._access.write() as connection:
            self._add(connection, row)
            for key in keys:
                ends = min(now + overlap_s, key.expires_at or math.inf)
                old = update(tables.keys).where(tables.keys.c.hash == key.hash)
                connection.execute(old.values(expires_at=ends))
            self._access.record(
                connection,
                "key.rotate",
                row.id,
                {"hash": keys[0].hash[:SHOWN]},
                {"hash": row.hash[:SHOWN], "overlap_s": overlap_s},
            )
        return plaintext

    def limit(self, prefix: str, limits: dict[str, float], policies: Sequence[str] | None = None) -> Key:
        """Set limits of a key, and its `policies` where they are given; return it.

        Raises as `match` and `create`.
        """
        keys = self.match(prefix)
        changed = replace(keys[0], limits=checked_limits(limits))
        if policies is not None:
            refuse_patterns(policies)
            changed = replace(changed, policies=[*policies])
        change = update(tables.keys).where(tables.keys.c.hash.in_([key.hash for key in keys]))
        with self._access.write() as connection:
            refuse_overlap(connection, changed)
            connection.execute(change.values(limits=changed.limits, policies=changed.policies))
            self._access.record(connection, "key.limits", changed.id, shown(keys[0]), shown(changed))
            tell(connection, None)
        return changed

    def tenant(self, name: str) -> Tenant:
        """Return a tenant; most have no row."""
        query = select(tables.tenants).where(tables.tenants.c.name == name)
        return self._access.one(Tenant, query) or Tenant(name)

    def set_tenant(self, tenant: Tenant) -> None:
        """Set a tenant's limits and weight. Raises `ConfigError` for an unknown limit or a weight of 0."""
        if not tenant.weight > 0:
            raise ConfigError(f"A tenant's weight must be above 0, not {tenant.weight:g}.")
        limits = checked_limits(tenant.limits)
        self._change_tenant("tenant.limits", tenant.name, limits=limits, weight=tenant.weight)

    def suspend(self, name: str, reason: str) -> Tenant:
        """Refuse all requests of a tenant from now on, until `resume`; return it.

        Raises `NotFound` for a name without keys, and `ConfigError` for the installation's own, or without a
        reason.
        """
        if name == LOCAL:
            raise ConfigError(f"The tenant {LOCAL!r} is the installation itself: it cannot be suspended.")
        if all(key.owner != name for key in self.all()):
            raise NotFound(f"No key belongs to a tenant {name!r}. `graftwork key ls` lists them.")
        if not (sentence := reason.strip()):
            raise ConfigError("A suspension needs a reason, which the tenant reads.")
        sentence += "." if sentence[-1].isalnum() else ""
        return self._change_tenant("tenant.suspend", name, suspended_at=time.time(), suspended_for=sentence)

    def resume(self, name: str) -> Tenant:
        """Take a tenant's requests again; return it. Raises `NotFound` when it is not suspended."""
        if self.tenant(name).suspended_at is None:
            raise NotFound(f"The tenant {name!r} is not suspended.")
        return self._change_tenant("tenant.resume", name, suspended_at=None, suspended_for=None)

    def tenants(self) -> list[Tenant]:
        """Return the tenants with limits or a weight of their own, or a suspension, by name."""
        return self._access.all(Tenant, select(tables.tenants).order_by(tables.tenants.c.name))

    def _change_tenant(self, action: str, name: str, **changes: Any) -> Tenant:
        """Change a tenant's row in one transaction, which gateways are told of; return it."""
        query = select(tables.tenants).where(tables.tenants.c.name == name)
        with self._access.write() as connection:
            tenant_row = connection.execute(query).one_or_none()
            before = Tenant(**tenant_row._mapping) if tenant_row else Tenant(name)
            row = replace(before, **changes)
            connection.execute(self._access.put(tables.tenants, row))
            self._access.record(connection, action, name, asdict(before), asdict(row))
            tell(connection, None)
        return row


def fresh(key: Key) -> tuple[str, Key]:
    """Return a new plaintext, and the key's row with its hash."""
    plaintext = f"{OURS}{secrets.token_hex(20)}"
    digest = hash_key(plaintext)
    return plaintext, replace(key, hash=digest, id=key.id or digest[:SHOWN])


def shown(key: Key) -> dict[str, Any]:
    """Return a key's fields as the audit log shows them: of its hash the beginning alone."""
    return asdict(key) | {"hash": key.hash[:SHOWN]}


def as_tinkers(plaintext: str) -> str:
    """Return a key's plaintext as Tinker's SDK accepts it."""
    return TINKERS + plaintext.removeprefix(OURS)


def roles_of(roles: str | Iterable[str]) -> list[str]:
    """Return roles by their names, or by a name of `SCOPES`. Raises `ConfigError` for an unknown one."""
    names = SCOPES.get(roles, (roles,)) if isinstance(roles, str) else tuple(roles)
    unknown = [role for role in names if role not in ROLES]
    if unknown or not names:
        raise ConfigError(
            f"A key's roles are of {', '.join(ROLES)}, or its scope is one of {', '.join(SCOPES)}; "
            f"not {', '.join(map(repr, unknown)) or 'none'}."
        )
    return [role for role in ROLES if role in names]


def checked_limits(limits: dict[str, float]) -> dict[str, float]:
    """Return limits that are known and not negative. Raises `ConfigError` for others."""
    limit_names = [field.name for field in fields(Limits)]
    for name, value in limits.items():
        if name not in limit_names or value < 0 or (name == "load_share" and value > 1):
            raise ConfigError(
                f"{name}={value:g} is not a limit. Limits are {', '.join(limit_names)}; none is below 0, and "
                "load_share is at most 1."
            )
    return limits


def refuse_patterns(patterns: Sequence[str]) -> None:
    """Raise `ConfigError` for what is neither a policy's name nor a prefix with `*` at its end."""
    for pattern in patterns:
        if not PATTERN.fullmatch(pattern):
            raise ConfigError(f"{pattern!r} is neither a policy's name nor a prefix such as 'acme-*'.")


def refuse_overlap(connection: Connection, key: Key) -> None:
    """Raise `Conflict` when a key would reach policies of another tenant.

    These are what its keys name, expired ones too, and what it owns, whatever became of its keys. Admin keys
    reach everything and are left out. While any tenant is limited to its own policies, every other tenant is.
    """
    if key.may("admin"):
        return
    others, now = [other for other in _others(connection, key.owner) if not other.may("admin")], time.time()
    for other in others:
        if other.revoked_at is not None or (not key.policies and not other.policies):
            continue
        if not key.policies or not other.policies:
            # A key that has expired without being limited names nothing.
            if not other.policies and not other.is_in_force(now):
                continue
            free = "This key" if not key.policies else f"Key {other.id} of {other.owner!r}"
            raise Conflict(
                f"{free} may use every policy, while other tenants are limited to theirs. Give its policies, "
                "such as `--policy 'acme-*'`; `graftwork key limits ID --policy` does so for an existing key."
            )
        both = [(mine, its) for mine in key.policies for its in other.policies if overlap(mine, its)]
        if both:
            raise Conflict(
                f"{both[0][0]!r} overlaps with {both[0][1]!r} of tenant {other.owner!r} (key {other.id}). "
                "Two tenants cannot share policies: choose other names, or revoke that key."
            )
    tenants = {other.owner for other in others}
    for pattern in key.policies:
        if (policy := _owned(connection, pattern, tenants)) is not None:
            raise Conflict(
                f"{pattern!r} covers the policy {policy.name!r} of tenant {policy.owner!r}. Two tenants "
                "cannot share policies: choose other names, or erase that tenant."
            )


def _owned(connection: Connection, pattern: str, tenants: Collection[str]) -> Any:
    """Return a policy within a pattern whose owner is one of these tenants, or None."""
    table, prefix = tables.policies.c, pattern.removesuffix("*")
    is_within = table.name == pattern
    if pattern != prefix:
        is_within = func.substr(table.name, 1, len(prefix)) == prefix
    query = select(table.name, table.owner).where(is_within, table.owner.in_(tenants)).limit(1)
    return connection.execute(query).one_or_none() if tenants else None


def refuse_outside(connection: Connection, policies: Iterable[Policy]) -> None:
    """Raise `Conflict` for a policy that is within the patterns of a tenant that does not own it.

    And for one that is outside of the patterns of its own tenant, where that has some.
    """
    limited = [
        key
        for key in _others(connection, None)
        if key.policies and not key.may("admin") and key.revoked_at is None
    ]
    if not limited:
        return
    for policy in policies:
        owners = {key.owner for key in limited if key.sees(policy.name)}
        if owners - {policy.owner}:
            raise Conflict(
                f"The name {policy.name!r} is within the policies of tenant {owners.pop()!r}, and its owner "
                f"is {policy.owner!r}. Set the policy's owner to that tenant, or choose another name."
            )
        if not owners and any(key.owner == policy.owner for key in limited):
            patterns = sorted({name for key in limited if key.owner == policy.owner for name in key.policies})
            raise Conflict(
                f"The name {policy.name!r} is outside of the policies of tenant {policy.owner!r}, which are "
                f"{', '.join(patterns)}. Choose a name within them."
            )


def _others(connection: Connection, owner: str | None) -> list[Key]:
    """Return the keys of other tenants than `owner`, revoked and expired ones too."""
    query = select(tables.keys)
    if owner is not None:
        query = query.where(tables.keys.c.owner != owner)
    return [Key(**row._mapping) for row in connection.execute(query)]
