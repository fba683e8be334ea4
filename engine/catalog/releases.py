"""Releases: attempts to make a revision the champion, at most one running per policy.

They change by compare-and-swap.
"""

import time
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell
from engine.catalog.records import Release
from engine.catalog.routes import refuse_missing, refuse_retired
from engine.errors import Conflict, NotFound


class Releases:
    """The catalog's releases; `catalog.releases`."""

    def __init__(self, access: Access):
        self._access = access

    def add(self, release: Release) -> None:
        """Start a release.

        Raises `Conflict` when another release of its policy is running or its revision is retired, and
        `NotFound` when the catalog does not have its revision.
        """
        try:
            with self._access.write() as connection:
                refuse_retired(connection, release.policy, [release.revision])
                refuse_missing(connection, release.policy, [release.revision])
                connection.execute(tables.releases.insert().values(**vars(release)))
                tell(connection, release.policy)
        except IntegrityError:
            raise Conflict(
                f"Another release of {release.policy!r} is running. Wait for its verdict, or hold it."
            ) from None

    def get(self, id: str) -> Release:
        """Return a release; `NotFound` when there is none with this id."""
        release = self._access.one(Release, select(tables.releases).where(tables.releases.c.id == id))
        if release is None:
            raise NotFound(f"There is no release {id!r}.")
        return release

    def all(self, policy: str | None = None, open_only: bool = False) -> list[Release]:
        """Return releases, newest first; `open_only` leaves out those that have ended."""
        table = tables.releases.c
        query = select(tables.releases).order_by(table.created_at.desc(), table.id)
        if policy is not None:
            query = query.where(table.policy == policy)
        if open_only:
            query = query.where(table.state == "running")
        return self._access.all(Release, query)

    def update(self, id: str, expected_version: int, **changes: Any) -> Release:
        """Change a release that still has `expected_version`; `Conflict` when it has changed since."""
        table = tables.releases.c
        values = changes | {"version": expected_version + 1, "updated_at": time.time()}
        change = update(tables.releases).where(table.id == id, table.version == expected_version)
        with self._access.write() as connection:
            row = connection.execute(change.values(**values).returning(tables.releases)).one_or_none()
            if row:
                tell(connection, row.policy)
        if row is None:
            raise Conflict(f"Release {id} has changed since version {expected_version}.")
        return Release(**row._mapping)
