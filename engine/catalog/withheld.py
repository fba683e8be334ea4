"""Revisions that are withheld: by a tombstone, or in quarantine.

What has a tombstone is not served, whatever its route says, until a person lifts it. What is in quarantine is
not loaded, because its bytes fail their checksum.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell
from engine.catalog.records import Tombstone
from engine.errors import Conflict, NotFound

COLUMNS = [column for column in tables.tombstones.c if column.name != "id"]


class Tombstones:
    """The catalog's tombstones; `catalog.tombstones`."""

    def __init__(self, access: Access):
        self._access = access
        names, mark = ", ".join(f'"{column.name}"' for column in COLUMNS), access.mark
        self._find = (
            f"SELECT {names} FROM tombstones WHERE policy = {mark} AND digest = {mark} AND lifted_at IS NULL"
        )

    def add(self, policy: str, digest: str, reason: str, by: str) -> Tombstone:
        """Stop serving a revision; the first reason stays when it already has a tombstone."""
        stone = Tombstone(policy, digest, reason, by, time.time())
        with self._access.write() as connection:
            new = self._access.new(tables.tombstones, stone).returning(tables.tombstones.c.id)
            if connection.execute(new).first():
                tell(connection, policy)
                self._access.record(connection, "tombstone.write", f"{policy}@{digest}", None, vars(stone))
        return self.find(policy, digest) or stone

    def lift(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """Lift a revision's tombstone, in a person's name; `NotFound` when there is none."""
        table = tables.tombstones.c
        values = {"lifted_by": by, "lifted_at": time.time(), "lifted_reason": reason}
        change = update(tables.tombstones).where(
            table.policy == policy, table.digest == digest, table.lifted_at.is_(None)
        )
        with self._access.write() as connection:
            row = connection.execute(change.values(**values).returning(*COLUMNS)).one_or_none()
            if row:
                tell(connection, policy)
                self._access.record(connection, "tombstone.lift", f"{policy}@{digest}", None, values)
        if row is None:
            raise NotFound(f"Revision {digest[:12]} of {policy!r} has no tombstone.")
        return Tombstone(**row._mapping)

    def find(self, policy: str, digest: str) -> Tombstone | None:
        """Return a revision's tombstone in force; None when it has none."""
        rows = self._access.quick(self._find, (policy, digest))
        return Tombstone(*rows[0]) if rows else None

    def in_force(self) -> list[Tombstone]:
        """Return the tombstones in force, oldest first."""
        return self._access.all(Tombstone, _in_force().order_by(tables.tombstones.c.at))


def _in_force() -> Any:
    return select(*COLUMNS).where(tables.tombstones.c.lifted_at.is_(None))


def refuse_tombstoned(connection: Connection, policy: str, digests: Sequence[str | None]) -> None:
    """Raise `Conflict` when one of these revisions has a tombstone."""
    table = tables.tombstones.c
    query = _in_force().where(table.policy == policy, table.digest.in_(digests))
    stone = connection.execute(query).first()
    if stone:
        raise Conflict(
            f"Revision {stone.digest[:12]} of {policy!r} has a tombstone: {stone.reason} "
            "Lift it first (`graftwork rollback --lift`)."
        )


class Quarantine:
    """The catalog's quarantine; `catalog.quarantine`."""

    def __init__(self, access: Access):
        self._access = access
        mark = access.mark
        self._find_reason = f"SELECT reason FROM quarantine WHERE policy = {mark} AND digest = {mark}"

    def add(self, policy: str, digest: str, reason: str) -> None:
        """Keep a revision with damaged bytes from being loaded; the first reason stays.

        Gateways learn of it by the change feed and drop the copies that they have.
        """
        row = {"policy": policy, "digest": digest, "reason": reason, "at": time.time()}
        with self._access.write() as connection:
            stone = self._access.insert(tables.quarantine).values(row).on_conflict_do_nothing()
            if connection.execute(stone).rowcount:
                tell(connection, policy)

    def reason(self, policy: str, digest: str) -> str | None:
        """Return why a revision is in quarantine; None when it is not."""
        rows = self._access.quick(self._find_reason, (policy, digest))
        return rows[0][0] if rows else None

    def among(self, digests: Sequence[str]) -> set[tuple[str, str]]:
        """Return which revisions (policy, digest) with these digests are in quarantine."""
        stones = tables.quarantine.c
        query = select(stones.policy, stones.digest)
        if not digests:
            return set()
        with self._access.read(self._access.single) as connection:
            between = query.where(stones.digest.between(min(digests), max(digests)))
            return {(policy, digest) for policy, digest in connection.execute(between)}

    def newest(self, limit: int) -> list[tuple[str, str, str]]:
        """Return at most `limit` quarantined revisions (policy, digest, reason), newest first."""
        stones = tables.quarantine.c
        query = select(stones.policy, stones.digest, stones.reason).order_by(stones.at.desc(), stones.digest)
        with self._access.read() as connection:
            return list(connection.execute(query.limit(limit)).tuples())

    def release(self, policy: str, digest: str) -> None:
        """End a revision's quarantine, if it is quarantined."""
        with self._access.write() as connection:
            lift_quarantine(connection, [(policy, digest)])


def lift_quarantine(connection: Connection, revisions: Iterable[tuple[str, str]]) -> None:
    """End the quarantine of these revisions (policy, digest), where they are quarantined."""
    stones = tables.quarantine.c
    if connection.execute(select(stones.policy).limit(1)).first() is None:
        return
    pairs, query = set(revisions), select(stones.policy, stones.digest)
    held = tables.rows_among(connection, query, stones.digest, {digest for _, digest in pairs})
    lifted = [{"of": of, "key": key} for of, key in held if (of, key) in pairs]
    if lifted:
        mine = (stones.policy == bindparam("of")) & (stones.digest == bindparam("key"))
        connection.execute(delete(tables.quarantine).where(mine), lifted)
