"""Queries for people: exported revisions, their lineage, search by digest prefix.

All are bounded or counted in the database: a catalog may hold a million revisions.
"""

from sqlalchemy import func, select

from engine.catalog.access import Access
from engine.catalog.records import Revision
from engine.catalog.revision_rows import (
    COLUMNS,
    EXPORTED,
    NEWEST_FIRST,
    RevisionRows,
    blob,
    prefix_range,
    table,
)


class Listing:
    """The catalog's queries for people; `catalog.listing`."""

    def __init__(self, access: Access, rows: RevisionRows):
        self._access = access
        self._rows = rows

    def exported(self, policy: str, limit: int) -> list[Revision]:
        """Return a policy's exported revisions, newest first."""
        query = select(*COLUMNS).where(table.policy == policy, table.state == EXPORTED)
        return self._rows.select(query.order_by(*NEWEST_FIRST).limit(limit))

    def newest_exported(self, policy: str) -> Revision | None:
        """Return a policy's newest exported revision; None when it has none."""
        return next(iter(self.exported(policy, 1)), None)

    def count_exported(self, policy: str) -> int:
        """Return how many exported revisions a policy has."""
        query = select(func.count()).where(table.policy == policy, table.state == EXPORTED)
        return int(self._access.scalar(query))

    def starting_with(self, digest_prefix: str, limit: int) -> list[Revision]:
        """Return revisions of any policy whose digest starts with this prefix."""
        between = prefix_range(digest_prefix)
        if between is None:
            return []
        query = select(*COLUMNS).where(table.digest >= between[0], table.digest <= between[1])
        return self._rows.select(query.order_by(table.digest, table.policy).limit(limit))

    def parents(self, policy: str, digest: str, limit: int = 100) -> list[Revision]:
        """Return a revision's known ancestors, its parent first."""
        parents: list[Revision] = []
        row = self._rows.find(policy, digest)
        while row and row.parent and len(parents) < limit:
            if row := self._rows.find(policy, row.parent):
                parents.append(row)
        return parents

    def children(self, policy: str, digest: str, limit: int = 100) -> list[Revision]:
        """Return the exported revisions trained from this one, oldest first."""
        query = select(*COLUMNS).where(
            table.parent == blob(digest), table.policy == policy, table.state == EXPORTED
        )
        return self._rows.select(query.order_by(table.created_at, table.digest).limit(limit))
