"""Queries of people who look: what changed last, what was exported, whose digest begins so.

All of them are bounded or counted in the database: a catalog may hold a million revisions.
"""

from sqlalchemy import func, select

from engine.catalog import tables
from engine.catalog.records import Revision, Route
from engine.catalog.revisions import EXPORTED, NEWEST_FIRST, Revisions, table
from engine.catalog.row_codec import COLUMNS, prefix_range


class Looks(Revisions):
    """The catalog's queries for looking; part of `Catalog`."""

    def base_names(self) -> dict[str, str]:
        """Return the names of the known bases by digest."""
        query = select(tables.bases.c.digest, tables.bases.c.name)
        with self._read() as connection:
            return {row.digest: row.name for row in connection.execute(query)}

    def latest_routes(self, limit: int) -> list[Route]:
        """Return the routes that changed last, newest first."""
        routes = tables.routes.c
        query = select(tables.routes).order_by(routes.updated_at.desc(), routes.policy).limit(limit)
        return self._all(Route, query)

    def count_policies(self) -> int:
        with self._read() as connection:
            return int(connection.execute(select(func.count()).select_from(tables.policies)).scalar_one())

    def exported(self, policy: str, limit: int) -> list[Revision]:
        """Return a policy's exported revisions, newest first."""
        query = select(*COLUMNS).where(table.policy == policy, table.state == EXPORTED)
        return self._rows(query.order_by(*NEWEST_FIRST).limit(limit))

    def newest_exported(self, policy: str) -> Revision | None:
        return next(iter(self.exported(policy, 1)), None)

    def count_exported(self, policy: str) -> int:
        query = select(func.count()).where(table.policy == policy, table.state == EXPORTED)
        with self._read() as connection:
            return int(connection.execute(query).scalar_one())

    def revisions_like(self, digest_prefix: str, limit: int) -> list[Revision]:
        """Return revisions of any policy whose digest begins so."""
        between = prefix_range(digest_prefix)
        if between is None:
            return []
        query = select(*COLUMNS).where(table.digest >= between[0], table.digest <= between[1])
        return self._rows(query.order_by(table.digest, table.policy).limit(limit))
