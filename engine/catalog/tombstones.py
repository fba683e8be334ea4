"""Tombstones: revisions that are not served, whatever their route says, until a person lifts them."""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select, update

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
            "Lift it first (`graftwork lift`)."
        )
