"""Routes: the revisions that a policy's bare name is served by. They change by compare-and-swap."""

import time
from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, Connection, and_, or_, select, update

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.changes import tell
from engine.catalog.records import Release, Route
from engine.catalog.revision_rows import blob
from engine.catalog.withheld import refuse_tombstoned
from engine.errors import Conflict, NotFound


class Routes(CatalogPart):
    """The catalog's routes; `catalog.routes`."""

    def get(self, policy: str) -> Route:
        """Return a policy's route; `NotFound` when there is no such policy."""
        route = self._access.one(Route, select(tables.routes).where(tables.routes.c.policy == policy))
        if route is None:
            raise NotFound(f"There is no policy {policy!r} in the catalog.")
        return route

    def page(self, after: str = "", limit: int = 1000, changed: bool = False) -> list[Route]:
        """Return a page of routes by policy; `after` is the last policy of the page before.

        `changed` leaves out those that were never updated since their policy was added.
        """
        table = tables.routes.c
        query = select(tables.routes).where(table.policy > after).order_by(table.policy).limit(limit)
        return self._access.all(Route, query.where(table.version > 0) if changed else query)

    def latest(self, limit: int) -> list[Route]:
        """Return the most recently changed routes, newest first."""
        routes = tables.routes.c
        query = select(tables.routes).order_by(routes.updated_at.desc(), routes.policy).limit(limit)
        return self._access.all(Route, query)

    def among(self, policies: Collection[str]) -> set[str]:
        """Return which of these policies have a route."""
        policy = tables.routes.c.policy
        with self._access.read() as connection:
            return {row.policy for row in tables.rows_among(connection, select(policy), policy, policies)}

    def first_policies(self, limit: int, patterns: Sequence[str] = ()) -> list[str]:
        """Return the names of the first policies that `patterns` (none: all) cover, in order of names."""
        table = tables.routes.c
        query = select(table.policy).order_by(table.policy).limit(limit)
        if patterns:
            query = query.where(or_(*(covered(table.policy, pattern) for pattern in patterns)))
        with self._access.read() as connection:
            return list(connection.execute(query).scalars())

    def update(self, route: Route, expected_version: int, release: Release | None = None) -> Route:
        """Replace a route that still has `expected_version`; return it with its new version.

        Raises `Conflict` when it has changed since, or names a tombstoned or retired champion or canary,
        and `NotFound` when it newly names one that the catalog does not have. `Conflict` also when `release`,
        in whose name it is changed, has changed since: another controller may have ended it.
        """
        table = tables.routes.c
        change = update(tables.routes).where(table.policy == route.policy, table.version == expected_version)
        with self._access.write() as connection:
            refuse_changed(connection, release)
            refuse_tombstoned(connection, route.policy, [route.champion, route.canary])
            refuse_retired(connection, route.policy, [route.champion, route.canary])
            # A revision that is routed already may stay, or a missing champion would block removing a bad
            # canary.
            row = connection.execute(select(tables.routes).where(table.policy == route.policy)).first()
            before = dict(row._mapping) if row else {}
            served = {before.get("champion"), before.get("canary")}
            refuse_missing(connection, route.policy, {route.champion, route.canary} - served)
            values = vars(route) | {"version": expected_version + 1, "updated_at": time.time()}
            # Only the canary that ran at the upgrade keeps its unit hashes.
            values["plain_units"] &= bool(before) and before["canary"] in (None, route.canary)
            if not connection.execute(change.values(**values)).rowcount:
                raise Conflict(f"The route of {route.policy!r} has changed since version {expected_version}.")
            tell(connection, route.policy)
            self._access.record(connection, "route.change", route.policy, before, values)
        return Route(**values)


def refuse_changed(connection: Connection, release: Release | None) -> None:
    """Raise `Conflict` when a release's row has changed since it was read; lock it until the commit."""
    if release is None:
        return
    table = tables.releases.c
    row = select(table.version).where(table.id == release.id).with_for_update()
    if connection.execute(row).scalar() != release.version:
        raise Conflict(f"Release {release.id} has changed since version {release.version}.")


def refuse_missing(connection: Connection, policy: str, digests: Collection[str | None]) -> None:
    """Raise `NotFound` when one of these revisions has no row, for instance because it expired."""
    table = tables.revisions.c
    for digest in digests:
        row = select(table.digest).where(table.digest == blob(digest or ""), table.policy == policy)
        if digest and connection.execute(row).first() is None:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")


def refuse_retired(connection: Connection, policy: str, digests: Sequence[str | None]) -> None:
    """Raise `Conflict` when one of these revisions is retired."""
    table = tables.revisions.c
    blobs = [blob(digest) for digest in digests if digest]
    query = select(table.digest, table.retired_reason).where(
        table.digest.in_(blobs), table.policy == policy, table.retired_at.is_not(None)
    )
    retired = connection.execute(query).first()
    if retired:
        raise Conflict(
            f"Revision {retired.digest.hex()[:12]} of {policy!r} is retired: {retired.retired_reason} "
            "Unretire it first (`graftwork adapters retire --off`)."
        )


def covered(column: ColumnElement[str], pattern: str) -> ColumnElement[bool]:
    """Return the condition that a pattern covers a column's name; an index can serve it."""
    if not pattern.endswith("*"):
        return column == pattern
    start = pattern.removesuffix("*")
    # "~" sorts after every character of a name.
    return and_(column >= start, column < start + "~")
