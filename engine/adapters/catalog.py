"""The catalog: durable index of bases, policies, revisions, routes and releases.

Knows how rows are read and written safely by several processes at once: every change is one
transaction; routes and releases change by compare-and-swap. Does not know what a release decides,
nor what a revision's bytes mean.
"""

import secrets
import time
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import Connection, Table, delete, or_, select, tuple_, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import IntegrityError

from engine.adapters import catalog_schema as schema
from engine.adapters.catalog_access import ensure_local_key, open_engine, sqlite_path
from engine.adapters.catalog_looks import Looks
from engine.adapters.catalog_schema import (
    AliasNote,
    Base,
    Key,
    Lease,
    Notice,
    Policy,
    Release,
    Revision,
    Route,
    ServingState,
    Tombstone,
)
from engine.errors import Conflict, NotFound

__all__ = [
    "AliasNote",
    "Base",
    "Catalog",
    "Key",
    "Lease",
    "Notice",
    "Policy",
    "Release",
    "Revision",
    "Route",
    "ServingState",
    "Tombstone",
    "ensure_local_key",
    "migrate",
]

# What a revision's row says of its bytes; everything else of a revision is part of what it is.
PLACE = ("layout", "segment", "offset", "length", "checksum")


def migrate(url: str) -> None:
    """Create the catalog or bring it to the newest schema; safe when several processes do it."""
    from alembic import command
    from alembic.config import Config

    path = sqlite_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    engine = open_engine(url)
    with FileLock(path.with_suffix(".lock")):
        with engine.connect() as connection:
            # The journal's mode is a property of the file and cannot change inside a transaction.
            connection.connection.cursor().execute("PRAGMA journal_mode=WAL")
        with engine.execution_options(write=True).begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    engine.dispose()


class Catalog(Looks):
    """One open catalog. Thread-safe; open one in each process."""

    # Bases, policies and layouts

    def add_base(self, base: Base) -> None:
        self._insert_new(schema.bases, base)

    def base(self, digest: str) -> Base:
        base = self._one(Base, select(schema.bases).where(schema.bases.c.digest == digest))
        if base is None:
            raise NotFound(f"There is no base {digest[:12]} in the catalog.")
        return base

    def add_policy(self, policy: Policy) -> None:
        """Add a policy with an empty route, or update the config of one that we own.

        Raises `Conflict` when another owner or another base holds the name.
        """
        route = Route(policy.name, salt=secrets.token_hex(8), updated_at=time.time())
        with self._write() as connection:
            if not connection.execute(_new(schema.policies, policy)).rowcount:
                _update_policy(connection, policy)
            connection.execute(_new(schema.routes, route))

    def policy(self, name: str) -> Policy:
        policy = self._one(Policy, select(schema.policies).where(schema.policies.c.name == name))
        if policy is None:
            known = ", ".join(policy.name for policy in self.policies()[:20]) or "none"
            raise NotFound(f"There is no policy {name!r} in the catalog. Known policies: {known}.")
        return policy

    def policies(self) -> list[Policy]:
        return self._all(Policy, select(schema.policies).order_by(schema.policies.c.name))

    def add_layout(self, digest: str, body: str) -> None:
        with self._write() as connection:
            row = insert(schema.layouts).values(digest=digest, body=body)
            connection.execute(row.on_conflict_do_nothing())

    def layout(self, digest: str) -> str:
        query = select(schema.layouts.c.body).where(schema.layouts.c.digest == digest)
        with self._engine.connect() as connection:
            body: str | None = connection.execute(query).scalar()
        if body is None:
            raise NotFound(f"There is no layout {digest[:12]} in the catalog.")
        return body

    # Revisions

    def add_revision(self, revision: Revision) -> bool:
        """Publish a revision; its bytes must be in the store already. Return whether it is new.

        A known snapshot that comes again as `exported` is one from now on and never expires; as a
        snapshot it expires at the later of the two times.
        """
        table = schema.revisions.c
        known = (table.policy == revision.policy) & (table.digest == revision.digest)
        with self._write() as connection:
            if connection.execute(_new(schema.revisions, revision)).rowcount:
                return True
            change = update(schema.revisions).where(known, table.state == "snapshot")
            if revision.state == "exported":
                connection.execute(change.values(state="exported", expires_at=None))
            else:
                later = table.expires_at < revision.expires_at
                connection.execute(change.where(later).values(expires_at=revision.expires_at))
        return False

    def move_revision(self, revision: Revision) -> Revision:
        """Let a known revision's row name the bytes that this one names; return the row, or this if none."""
        table = schema.revisions.c
        place = {name: getattr(revision, name) for name in PLACE}
        known = (table.policy == revision.policy) & (table.digest == revision.digest)
        change = update(schema.revisions).where(known).values(**place).returning(schema.revisions)
        with self._write() as connection:
            row = connection.execute(change).one_or_none()
        return Revision(**row._mapping) if row else revision

    def revision(self, policy: str, digest_prefix: str) -> Revision:
        """Return the one revision whose digest begins so; `NotFound`, or `Conflict` when several do."""
        table = schema.revisions.c
        # Hex digits sort before "g": the range is the prefix, and the primary key answers it.
        query = select(schema.revisions).where(
            table.policy == policy, table.digest >= digest_prefix, table.digest < digest_prefix + "g"
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query.limit(2)).all()
        if not rows:
            raise NotFound(f"Policy {policy!r} has no revision {digest_prefix[:12]!r} in the catalog.")
        if len(rows) > 1:
            raise Conflict(f"Several revisions of {policy!r} begin with {digest_prefix!r}; give more digits.")
        return Revision(**rows[0]._mapping)

    def revisions(self, policy: str, after: Revision | None = None, limit: int = 100) -> list[Revision]:
        """Return a page of revisions, newest first; `after` is the last one of the page before."""
        table = schema.revisions.c
        query = select(schema.revisions).where(table.policy == policy)
        if after is not None:
            query = query.where(tuple_(table.created_at, table.digest) < (after.created_at, after.digest))
        newest = query.order_by(table.created_at.desc(), table.digest.desc()).limit(limit)
        return self._all(Revision, newest)

    def set_probe(self, policy: str, digest: str, result: dict[str, Any]) -> None:
        table = schema.revisions.c
        change = update(schema.revisions).where(table.policy == policy, table.digest == digest)
        with self._write() as connection:
            if not connection.execute(change.values(probe=result)).rowcount:
                raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")

    def expire(self, now: float) -> list[Revision]:
        """Remove and return the expired snapshots that no route and no release names."""
        revision, route, release = schema.revisions.c, schema.routes.c, schema.releases.c
        routed = select(1).where(
            route.policy == revision.policy,
            or_(*(column == revision.digest for column in (route.champion, route.previous, route.canary))),
        )
        released = select(1).where(
            release.policy == revision.policy,
            or_(release.revision == revision.digest, release.baseline == revision.digest),
        )
        expired = delete(schema.revisions).where(
            revision.expires_at < now, revision.state == "snapshot", ~routed.exists(), ~released.exists()
        )
        with self._write() as connection:
            rows = connection.execute(expired.returning(schema.revisions)).all()
        return [Revision(**row._mapping) for row in rows]

    # Routes and tombstones

    def route(self, policy: str) -> Route:
        route = self._one(Route, select(schema.routes).where(schema.routes.c.policy == policy))
        if route is None:
            raise NotFound(f"There is no policy {policy!r} in the catalog.")
        return route

    def routes(self) -> list[Route]:
        return self._all(Route, select(schema.routes).order_by(schema.routes.c.policy))

    def set_route(self, route: Route, expected_version: int) -> Route:
        """Replace a route that still has `expected_version`; return it with its new version.

        Raises `Conflict` when it has changed since, or names a tombstoned champion or canary.
        """
        table = schema.routes.c
        values = vars(route) | {"version": expected_version + 1, "updated_at": time.time()}
        change = update(schema.routes).where(table.policy == route.policy, table.version == expected_version)
        with self._write() as connection:
            _refuse_buried(connection, route)
            if not connection.execute(change.values(**values)).rowcount:
                raise Conflict(f"The route of {route.policy!r} has changed since version {expected_version}.")
        return Route(**values)

    def bury(self, policy: str, digest: str, reason: str, by: str) -> Tombstone:
        """Serve a revision to nobody from now on; keeps the first reason when it is buried already."""
        stone = Tombstone(policy, digest, reason, by, time.time())
        with self._write() as connection:
            connection.execute(_new(schema.tombstones, stone))
        return self.tombstone(policy, digest) or stone

    def lift(self, policy: str, digest: str, by: str, reason: str) -> Tombstone:
        """End a revision's tombstone, in a person's name; `NotFound` when there is none."""
        table = schema.tombstones.c
        values = {"lifted_by": by, "lifted_at": time.time(), "lifted_reason": reason}
        change = update(schema.tombstones).where(
            table.policy == policy, table.digest == digest, table.lifted_at.is_(None)
        )
        with self._write() as connection:
            row = connection.execute(
                change.values(**values).returning(*_columns(schema.tombstones))
            ).one_or_none()
        if row is None:
            raise NotFound(f"Revision {digest[:12]} of {policy!r} has no tombstone.")
        return Tombstone(**row._mapping)

    def tombstone(self, policy: str, digest: str) -> Tombstone | None:
        table = schema.tombstones.c
        return self._one(
            Tombstone, _active_tombstones().where(table.policy == policy, table.digest == digest)
        )

    def tombstones(self) -> list[Tombstone]:
        """Return the tombstones in force, oldest first."""
        return self._all(Tombstone, _active_tombstones().order_by(schema.tombstones.c.at))

    def serving_state(self) -> ServingState:
        """Return everything that a gateway routes by, as of one moment."""
        keys = select(schema.keys).where(schema.keys.c.revoked_at.is_(None))
        with self._engine.begin() as connection:
            routes = {row.policy: Route(**row._mapping) for row in connection.execute(select(schema.routes))}
            reasons = {
                (row.policy, row.digest): row.reason for row in connection.execute(_active_tombstones())
            }
            in_force = {row.hash: Key(**row._mapping) for row in connection.execute(keys)}
        return ServingState(routes, frozenset(reasons), reasons, in_force)

    # Releases

    def add_release(self, release: Release) -> None:
        """Start a release; `Conflict` when another one of its policy is running."""
        try:
            with self._write() as connection:
                connection.execute(insert(schema.releases).values(**vars(release)))
        except IntegrityError:
            raise Conflict(
                f"Another release of {release.policy!r} is running. Wait for its verdict, or hold it."
            ) from None

    def release(self, id: str) -> Release:
        release = self._one(Release, select(schema.releases).where(schema.releases.c.id == id))
        if release is None:
            raise NotFound(f"There is no release {id!r}.")
        return release

    def releases(self, policy: str | None = None, open_only: bool = False) -> list[Release]:
        """Return releases, newest first; `open_only` leaves out those that have ended."""
        table = schema.releases.c
        query = select(schema.releases).order_by(table.created_at.desc(), table.id)
        if policy is not None:
            query = query.where(table.policy == policy)
        if open_only:
            query = query.where(table.state == "running")
        return self._all(Release, query)

    def update_release(self, id: str, expected_version: int, **changes: Any) -> Release:
        """Change a release that still has `expected_version`; `Conflict` when it has changed since."""
        table = schema.releases.c
        values = changes | {"version": expected_version + 1, "updated_at": time.time()}
        change = update(schema.releases).where(table.id == id, table.version == expected_version)
        with self._write() as connection:
            row = connection.execute(change.values(**values).returning(schema.releases)).one_or_none()
        if row is None:
            raise Conflict(f"Release {id} has changed since version {expected_version}.")
        return Release(**row._mapping)

    def _insert_new(self, table: Table, row: Any) -> None:
        with self._write() as connection:
            connection.execute(_new(table, row))

    def _all(self, kind: Any, query: Any) -> list[Any]:
        with self._engine.connect() as connection:
            return [kind(**row._mapping) for row in connection.execute(query)]


def _new(table: Table, row: Any) -> Any:
    return insert(table).values(**vars(row)).on_conflict_do_nothing()


def _columns(table: Table) -> list[Any]:
    return [column for column in table.c if column.name != "id"]


def _active_tombstones() -> Any:
    return select(*_columns(schema.tombstones)).where(schema.tombstones.c.lifted_at.is_(None))


def _update_policy(connection: Connection, policy: Policy) -> None:
    table = schema.policies.c
    known = connection.execute(select(schema.policies).where(table.name == policy.name)).one()
    if known.owner != policy.owner:
        raise Conflict(f"Policy {policy.name!r} belongs to {known.owner!r}; choose another name.")
    if known.base != policy.base:
        raise Conflict(
            f"Policy {policy.name!r} is a line of training on base {known.base[:12]}, not on "
            f"{policy.base[:12]}; choose another name or another state_dir."
        )
    connection.execute(update(schema.policies).where(table.name == policy.name).values(config=policy.config))


def _refuse_buried(connection: Connection, route: Route) -> None:
    table = schema.tombstones.c
    served = [digest for digest in (route.champion, route.canary) if digest]
    query = _active_tombstones().where(table.policy == route.policy, table.digest.in_(served))
    buried = connection.execute(query).first()
    if buried:
        raise Conflict(
            f"Revision {buried.digest[:12]} of {route.policy!r} has a tombstone: {buried.reason} "
            "Lift it first (`graftwork lift`)."
        )
