"""Bases: the frozen models that policies are trained on, by digest."""

from sqlalchemy import select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import Base
from engine.errors import NotFound


class Bases:
    """The catalog's bases; `catalog.bases`."""

    def __init__(self, access: Access):
        self._access = access

    def add(self, base: Base) -> None:
        """Add a base; of a known one only the path is replaced: its files may have moved."""
        query = self._access.insert(tables.bases).values(**vars(base))
        with self._access.write() as connection:
            connection.execute(
                query.on_conflict_do_update(index_elements=["digest"], set_={"path": base.path})
            )

    def get(self, digest: str) -> Base:
        """Return a base; `NotFound` when the catalog does not have it."""
        base = self._access.one(Base, select(tables.bases).where(tables.bases.c.digest == digest))
        if base is None:
            raise NotFound(f"There is no base {digest[:12]} in the catalog.")
        return base

    def names(self) -> dict[str, str]:
        """Return the names of the known bases by digest."""
        query = select(tables.bases.c.digest, tables.bases.c.name)
        with self._access.read() as connection:
            return {row.digest: row.name for row in connection.execute(query)}
