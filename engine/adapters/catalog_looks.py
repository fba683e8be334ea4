"""Queries of people who look: what changed last, what was exported, whose digest begins so.

All of them are bounded or counted in the database: a catalog may hold a million revisions.
"""

from sqlalchemy import func, select

from engine.adapters import catalog_schema as schema
from engine.adapters.catalog_notes import Notes
from engine.adapters.catalog_schema import Revision, Route


class Looks(Notes):
    """The catalog's queries for looking; part of `Catalog`."""

    def base_names(self) -> dict[str, str]:
        """Return the names of the known bases by digest."""
        query = select(schema.bases.c.digest, schema.bases.c.name)
        with self._engine.connect() as connection:
            return {row.digest: row.name for row in connection.execute(query)}

    def latest_routes(self, limit: int) -> list[Route]:
        """Return the routes that changed last, newest first."""
        table = schema.routes.c
        query = select(schema.routes).order_by(table.updated_at.desc(), table.policy).limit(limit)
        with self._engine.connect() as connection:
            return [Route(**row._mapping) for row in connection.execute(query)]

    def count_policies(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(select(func.count()).select_from(schema.policies)).scalar_one())

    def exported(self, policy: str, limit: int) -> list[Revision]:
        """Return a policy's exported revisions, newest first."""
        table = schema.revisions.c
        query = select(schema.revisions).where(table.policy == policy, table.state == "exported")
        newest = query.order_by(table.created_at.desc(), table.digest.desc()).limit(limit)
        with self._engine.connect() as connection:
            return [Revision(**row._mapping) for row in connection.execute(newest)]

    def newest_exported(self, policy: str) -> Revision | None:
        return next(iter(self.exported(policy, 1)), None)

    def children(self, policy: str, digest: str) -> list[Revision]:
        """Return the exported revisions that were trained from this one, oldest first."""
        table = schema.revisions.c
        query = select(schema.revisions).where(
            table.policy == policy, table.parent == digest, table.state == "exported"
        )
        with self._engine.connect() as connection:
            found = connection.execute(query.order_by(table.created_at))
            return [Revision(**row._mapping) for row in found]

    def count_exported(self, policy: str) -> int:
        table = schema.revisions.c
        query = select(func.count()).where(table.policy == policy, table.state == "exported")
        with self._engine.connect() as connection:
            return int(connection.execute(query).scalar_one())

    def revisions_like(self, digest_prefix: str, limit: int) -> list[Revision]:
        """Return revisions of any policy whose digest begins so; it reads the whole table."""
        table = schema.revisions.c
        query = select(schema.revisions).where(
            table.digest >= digest_prefix, table.digest < digest_prefix + "g"
        )
        with self._engine.connect() as connection:
            return [Revision(**row._mapping) for row in connection.execute(query.limit(limit))]
