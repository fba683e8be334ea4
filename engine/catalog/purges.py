"""Purges: the removal of every row of a policy, and the mark on its name."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.changes import tell
from engine.errors import Conflict, Purged

# Rows of one write transaction, for which other writers wait.
CHUNK = 10_000
# Of the tables cleared last, those that gateways read.
TOLD = frozenset({"releases", "tombstones"})


class Purges(CatalogPart):
    """The catalog's purges; `catalog.purges`."""

    def mark(self, policy: str, by: str, now: float) -> dict[str, int]:
        """Mark a policy's name as purged and remove policy and route; return rows removed by table.

        From then on nothing of it is served, and nothing new is published.
        """
        mark = {"policy": policy, "by": by, "at": now}
        removed: dict[str, int] = {}
        with self._access.write() as connection:
            for name, column in (("policies", "name"), ("routes", "policy")):
                removed[name] = _delete(connection, name, column, policy)
            stone = self._access.insert(tables.purged).values(mark)
            # A name that was used again keeps its last purge; one that is only purged keeps the first.
            if removed["policies"]:
                stone = stone.on_conflict_do_update(index_elements=["policy"], set_=mark)
            else:
                stone = stone.on_conflict_do_nothing()
            connection.execute(stone)
            tell(connection, policy)
            self._access.record(connection, "policy.purge", policy, None, mark | {"removed": removed})
        return removed

    def run(self, policy: str, by: str, now: float) -> dict[str, int]:
        """Remove every row of a policy and mark its name as purged; return rows removed by table.

        Safe to repeat after a crash: the mark comes first, so that nothing new is published, and tombstones
        go last, so that no rolled-back revision is served meanwhile.
        """
        removed = self.mark(policy, by, now) | {"revisions": 0}
        while rows := self._remove_revisions(policy):
            removed["revisions"] += rows
        for name in ("releases", "aliases", "notices", "quarantine", "tombstones"):
            with self._access.write() as connection:
                removed[name] = _delete(connection, name, "policy", policy)
                if removed[name] and name in TOLD:
                    tell(connection, policy)
        return removed

    def find(self, policy: str) -> dict[str, Any] | None:
        """Return who purged a policy (`by`) and when (`at`); None when nobody did."""
        query = select(tables.purged).where(tables.purged.c.policy == policy)
        with self._access.read() as connection:
            row = connection.execute(query).one_or_none()
        return dict(row._mapping) if row else None

    def marks(self) -> dict[str, float]:
        """Return when each purged name was purged, of those too that were used again."""
        with self._access.read() as connection:
            rows = connection.execute(select(tables.purged.c.policy, tables.purged.c.at))
            return dict(rows.tuples().all())

    def gone(self, policies: Collection[str]) -> set[str]:
        """Return which of these names were purged and not used again."""
        with self._access.read() as connection:
            return _gone(connection, policies)

    def _remove_revisions(self, policy: str) -> int:
        table = tables.revisions.c
        some = select(table.digest).where(table.policy == policy).limit(CHUNK)
        gone = delete(tables.revisions).where(table.digest == bindparam("key"), table.policy == policy)
        with self._access.write() as connection:
            digests = connection.execute(some).scalars().all()
            if digests:
                connection.execute(gone, [{"key": digest} for digest in digests])
                tell(connection, policy)
        return len(digests)


def refuse_purged(connection: Connection, policies: Collection[str]) -> None:
    """Raise `Purged` when some of these policies were purged and not created again."""
    if purged := sorted(_gone(connection, policies)):
        raise Purged(f"Policy {purged[0]!r} was purged. Create it again to publish revisions of it.")


def _gone(connection: Connection, policies: Collection[str]) -> set[str]:
    marks, known = tables.purged.c, tables.policies.c
    there = select(known.name).where(known.name == marks.policy)
    query = select(marks.policy).where(~there.exists())
    return {row.policy for row in tables.rows_among(connection, query, marks.policy, policies)}


def refuse_purged_names(connection: Connection, names: Sequence[str]) -> None:
    """Raise `Conflict` when one of these names was purged."""
    marks = tables.purged.c
    gone = connection.execute(select(tables.purged).where(marks.policy.in_(names)).limit(1)).one_or_none()
    if gone:
        raise Conflict(
            f"The name {gone.policy!r} was purged by {gone.by!r}. Choose another name, or allow its reuse "
            "explicitly."
        )


def _delete(connection: Connection, name: str, column: str, policy: str) -> int:
    rows = tables.metadata.tables[name]
    return connection.execute(delete(rows).where(rows.c[column] == policy)).rowcount
