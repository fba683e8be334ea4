"""What gateways route by: routes, and tombstones that are stronger than routes."""

import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Table, func, select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import Route, Tombstone
from engine.catalog.row_codec import blob
from engine.errors import Conflict, NotFound

# Names for one query.
CHUNK = 1000


class Routes(Access):
    """The catalog's routes and tombstones; part of `Catalog`."""

    def __init__(self, url: str):
        super().__init__(url)
        names = ", ".join(f'"{column.name}"' for column in _columns(tables.tombstones))
        self._find_stone = (
            f"SELECT {names} FROM tombstones "
            f"WHERE policy = {self._mark} AND digest = {self._mark} AND lifted_at IS NULL"
        )

    def route(self, policy: str) -> Route:
        route = self._one(Route, select(tables.routes).where(tables.routes.c.policy == policy))
        if route is None:
            raise NotFound(f"There is no policy {policy!r} in the catalog.")
        return route

    def routes(self, after: str = "", limit: int = 1000, changed: bool = False) -> list[Route]:
        """Return a page of routes by policy; `after` is the last policy of the page before.

        `changed` leaves out those that are still as their policy was made with.
        """
        table = tables.routes.c
        query = select(tables.routes).where(table.policy > after).order_by(table.policy).limit(limit)
        return self._all(Route, query.where(table.version > 0) if changed else query)

    def routed(self, policies: Collection[str]) -> set[str]:
        """Return which of these names have a route here."""
        table, names, found = tables.routes.c, list(policies), set[str]()
        with self._read() as connection:
            for at in range(0, len(names), CHUNK):
                wanted = table.policy.in_(names[at : at + CHUNK])
                found |= set(connection.execute(select(table.policy).where(wanted)).scalars())
        return found

    def set_route(self, route: Route, expected_version: int) -> Route:
        """Replace a route that still has `expected_version`; return it with its new version.

        Raises `Conflict` when it has changed since, or names a tombstoned or retired champion or canary,
        and `NotFound` when it names one anew that the catalog does not have.
        """
        table = tables.routes.c
        values = vars(route) | {"version": expected_version + 1, "updated_at": time.time()}
        change = update(tables.routes).where(table.policy == route.policy, table.version == expected_version)
        with self._write() as connection:
            refuse_buried(connection, route.policy, [route.champion, route.canary])
            refuse_retired(connection, route.policy, [route.champion, route.canary])
            # What is routed already may stay, or a bad canary could not be taken away beside it.
            known = connection.execute(
                select(table.champion, table.canary).where(table.policy == route.policy)
            ).first()
            refuse_missing(connection, route.policy, {route.champion, route.canary} - set(known or ()))
            if not connection.execute(change.values(**values)).rowcount:
                raise Conflict(f"The route of {route.policy!r} has changed since version {expected_version}.")
            self._tell(connection, route.policy)
        return Route(**values)

    def bury(self, policy: str, digest: str, reason: str, by: str) -> Tombstone:
        """Serve a revision to nobody from now on; keeps the first reason when it is buried already."""
        stone = Tombstone(policy, digest, reason, by, time.time())
        with self._write() as connection:
            if connection.execute(self._new(tables.tombstones, stone)).rowcount:
                self._tell(connection, policy)
        return self.tombstone(policy, digest) or stone

    def lift(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """End a revision's tombstone, in a person's name; `NotFound` when there is none."""
        table = tables.tombstones.c
        values = {"lifted_by": by, "lifted_at": time.time(), "lifted_reason": reason}
        change = update(tables.tombstones).where(
            table.policy == policy, table.digest == digest, table.lifted_at.is_(None)
        )
        with self._write() as connection:
            row = connection.execute(
                change.values(**values).returning(*_columns(tables.tombstones))
            ).one_or_none()
            if row:
                self._tell(connection, policy)
        if row is None:
            raise NotFound(f"Revision {digest[:12]} of {policy!r} has no tombstone.")
        return Tombstone(**row._mapping)

    def tombstone(self, policy: str, digest: str) -> Tombstone | None:
        rows = self._quick(self._find_stone, (policy, digest))
        return Tombstone(*rows[0]) if rows else None

    def tombstones(self) -> list[Tombstone]:
        """Return the tombstones in force, oldest first."""
        return self._all(Tombstone, _active_tombstones().order_by(tables.tombstones.c.at))

    def changed_since(self, seen: int) -> tuple[int, set[str | None] | None]:
        """Return the newest change's number, and of which policies something changed after the one `seen`.

        That is what gateways route by: routes, stones, releases, revisions that are gone. A name of
        None: the keys. None for the names: more changes than are kept, so anything may have.
        """
        table = tables.changes.c
        with self._read(self._moment) as connection:
            oldest, newest = connection.execute(select(func.min(table.id), func.max(table.id))).one()
            if newest is None:
                return 0, set() if seen == 0 else None
            if seen + 1 < oldest or seen > newest:
                return newest, None
            found = select(table.policy).where(table.id > seen).distinct()
            return newest, set(connection.execute(found).scalars())

    def first_policies(self, limit: int) -> list[str]:
        """Return the names of so many policies, in their order."""
        table = tables.routes.c
        with self._read() as connection:
            found = connection.execute(select(table.policy).order_by(table.policy).limit(limit))
            return list(found.scalars())


def _columns(table: Table) -> list[Any]:
    return [column for column in table.c if column.name != "id"]


def _active_tombstones() -> Any:
    return select(*_columns(tables.tombstones)).where(tables.tombstones.c.lifted_at.is_(None))


def refuse_buried(connection: Connection, policy: str, digests: Sequence[str | None]) -> None:
    """Raise `Conflict` when one of these revisions has a tombstone."""
    table = tables.tombstones.c

    query = _active_tombstones().where(table.policy == policy, table.digest.in_(digests))
    buried = connection.execute(query).first()
    if buried:
        raise Conflict(
            f"Revision {buried.digest[:12]} of {policy!r} has a tombstone: {buried.reason} "
            "Lift it first (`graftwork lift`)."
        )


def refuse_missing(connection: Connection, policy: str, digests: Collection[str | None]) -> None:
    """Raise `NotFound` when the catalog has no row of one of these revisions, as when it has expired."""
    table = tables.revisions.c
    for digest in digests:
        row = select(table.digest).where(table.digest == blob(digest or ""), table.policy == policy)
        if digest and connection.execute(row).first() is None:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")


def refuse_retired(connection: Connection, policy: str, digests: Sequence[str | None]) -> None:
    """Raise `Conflict` when one of these revisions is retired."""
    table = tables.revisions.c
    wanted = [blob(digest) for digest in digests if digest]
    query = select(table.digest, table.retired_reason).where(
        table.digest.in_(wanted), table.policy == policy, table.retired_at.is_not(None)
    )
    retired = connection.execute(query).first()
    if retired:
        raise Conflict(
            f"Revision {retired.digest.hex()[:12]} of {policy!r} is retired: {retired.retired_reason} "
            "Take it back first (`graftwork adapters unretire`)."
        )
