"""Releases: attempts to make a revision the champion, at most one running per policy.

They change by compare-and-swap.
"""

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.changes import tell
from engine.catalog.records import Release
from engine.catalog.routes import refuse_missing, refuse_retired
from engine.errors import Conflict, NotFound


class Releases(CatalogPart):
    """The catalog's releases; `catalog.releases`."""

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
                self._access.record(connection, "release.start", release.policy, None, _shown(vars(release)))
        except IntegrityError:
            raise Conflict(
                f"Another release of {release.policy!r} is running. Wait for its verdict, or replace it "
                "(`graftwork release --if-running`)."
            ) from None

    def refuse(self, policy: str, digest: str) -> None:
        """Raise as `add` does for a revision that is retired, or that the catalog does not have."""
        with self._access.read() as connection:
            refuse_retired(connection, policy, [digest])
            refuse_missing(connection, policy, [digest])

    def get(self, id: str) -> Release:
        """Return a release; `NotFound` when there is none with this id."""
        release = self._access.one(Release, select(tables.releases).where(tables.releases.c.id == id))
        if release is None:
            raise NotFound(f"There is no release {id!r}.")
        return release

    def all(
        self, policy: str | None = None, open_only: bool = False, limit: int | None = None
    ) -> list[Release]:
        """Return releases, newest first, at most `limit`; `open_only` leaves out those that have ended."""
        table = tables.releases.c
        query = select(tables.releases).order_by(table.created_at.desc(), table.id).limit(limit)
        if policy is not None:
            query = query.where(table.policy == policy)
        if open_only:
            query = query.where(table.state == "running")
        return self._access.all(Release, query)

    def update(self, id: str, expected_version: int, **changes: Any) -> Release:
        """Change a release that still has `expected_version`; `Conflict` when it has changed since."""
        table = tables.releases.c
        values = {"updated_at": time.time()} | changes | {"version": expected_version + 1}
        change = update(tables.releases).where(table.id == id, table.version == expected_version)
        with self._access.write() as connection:
            old_row = connection.execute(select(tables.releases).where(table.id == id)).one_or_none()
            row = connection.execute(change.values(**values).returning(tables.releases)).one_or_none()
            if row:
                tell(connection, row.policy)
                before, after = (_shown(dict(one._mapping)) for one in (old_row or row, row))
                if before != after:
                    self._access.record(connection, "release.change", row.policy, before, after)
        if row is None:
            raise Conflict(f"Release {id} has changed since version {expected_version}.")
        return Release(**row._mapping)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the audit log keeps of a release: not the evidence, which the ledger has."""
    names = (
        "id", "revision", "baseline", "step", "weight", "state", "approved", "reason", "skip_gates",
        "approvals", "pauses",
    )  # fmt: skip
    return {name: row[name] for name in names}
