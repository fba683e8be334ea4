"""The catalog: durable index of bases, policies, revisions, routes and releases.

Knows how rows are read and written safely by several processes at once: every change is one
transaction; routes and releases change by compare-and-swap. Does not know what a release decides,
nor what a revision's bytes mean.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError, OperationalError

from engine.catalog import tables
from engine.catalog.batches import Batches
from engine.catalog.database import open_engine, sqlite_path
from engine.catalog.guards import Guards, ensure_local_key
from engine.catalog.lifecycle import Lifecycle
from engine.catalog.listing import Looks
from engine.catalog.notes import Notes
from engine.catalog.records import (
    AliasNote,
    Base,
    Key,
    Lease,
    Notice,
    Policy,
    Release,
    Revision,
    Route,
    Tombstone,
)
from engine.catalog.routes import Routes, refuse_missing, refuse_retired
from engine.errors import AdapterError, Conflict, NotFound, ServiceError

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
    "Tombstone",
    "ensure_local_key",
    "migrate",
]

# Policies of one transaction, or of one query.
POLICIES = 1_000


def migrate(url: str) -> None:
    """Create the catalog or bring it to the newest schema; safe when several processes do it.

    Raises `ServiceError` when its disk is full or read-only, or the database does not answer.
    """
    try:
        _migrate(url)
    except (OSError, OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.orig
        raise ServiceError(
            f"The catalog {sqlite_path(url) or 'in Postgres'} cannot be opened for writing: {reason}. "
            "See that it answers, is writable and has room on its disk; nothing was changed."
        ) from None


def _migrate(url: str) -> None:
    path = sqlite_path(url)
    if path is None:
        _upgrade(url)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        engine = open_engine(url)
        with engine.connect() as connection:
            # The journal's mode is a property of the file and cannot change inside a transaction.
            connection.connection.cursor().execute("PRAGMA journal_mode=WAL")
        engine.dispose()
        _upgrade(url)


def _upgrade(url: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    engine = open_engine(url)
    with engine.execution_options(write=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    engine.dispose()


class Catalog(Guards, Notes, Routes, Looks, Batches, Lifecycle):
    """One open catalog. Thread-safe; open one in each process."""

    @cached_property
    def id(self) -> str:
        """The catalog's own id, by which a store knows whose it is."""
        with self._read() as connection:
            return str(connection.execute(select(tables.catalog.c.id)).scalar_one())

    # Bases, policies and layouts

    def add_base(self, base: Base) -> None:
        with self._write() as connection:
            connection.execute(self._new(tables.bases, base))

    def base(self, digest: str) -> Base:
        base = self._one(Base, select(tables.bases).where(tables.bases.c.digest == digest))
        if base is None:
            raise NotFound(f"There is no base {digest[:12]} in the catalog.")
        return base

    def add_policy(self, policy: Policy, again: bool = False) -> None:
        """Add a policy with an empty route, or update the config of one that we own.

        Raises `Conflict` when another owner or another base holds the name, or when the name was
        purged and is not taken `again` on purpose.
        """
        self.add_policies([policy], again)

    def add_policies(self, policies: Iterable[Policy], again: bool = False) -> None:
        """Do as `add_policy` for many, 1,000 a transaction; when one is refused, those before are there."""
        given = iter(policies)
        while some := list(islice(given, POLICIES)):
            with self._write() as connection:
                self._add_policies(connection, some, again)

    def _add_policies(self, connection: Connection, policies: Sequence[Policy], again: bool) -> None:
        table = tables.policies
        found = connection.execute(select(table).where(table.c.name.in_([one.name for one in policies])))
        known = {row.name: Policy(**row._mapping) for row in found}
        new: dict[str, Policy] = {}
        for policy in policies:
            if before := known.get(policy.name) or new.get(policy.name):
                _refuse_others(before, policy)
            if policy.name in known:
                mine = table.c.name == policy.name
                connection.execute(update(table).where(mine).values(config=policy.config))
            else:
                new[policy.name] = policy
        if not new:
            return
        if not again:
            _refuse_purged_names(connection, list(new))
        now = time.time()
        routes = [Route(name, salt=secrets.token_hex(8), updated_at=now) for name in new]
        connection.execute(table.insert(), list(map(vars, new.values())))
        connection.execute(tables.routes.insert(), list(map(vars, routes)))
        self._tell(connection, *new)

    def policy(self, name: str) -> Policy:
        policy = self._one(Policy, select(tables.policies).where(tables.policies.c.name == name))
        if policy is None:
            near = self.nearest_policies(name)
            known = ", ".join(near) or "none"
            raise NotFound(f"There is no policy {name!r} in the catalog. Known policies: {known}.", near)
        return policy

    def policies(self, after: str = "", limit: int = 1000) -> list[Policy]:
        """Return a page of policies by name; `after` is the last name of the page before."""
        table = tables.policies.c
        query = select(tables.policies).where(table.name > after).order_by(table.name).limit(limit)
        return self._all(Policy, query)

    def owners(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return owner and base of those of these policies that are there."""
        table = tables.policies.c
        query = select(table.name, table.owner, table.base)
        found: dict[str, tuple[str, str]] = {}
        with self._read() as connection:
            for at in range(0, len(names), POLICIES):
                rows = connection.execute(query.where(table.name.in_(names[at : at + POLICIES])))
                found |= {name: (owner, base) for name, owner, base in rows}
        return found

    def add_layout(self, digest: str, body: str) -> None:
        """Add a layout by the sha256 of its body; a body that the disk has damaged is whole again."""
        with self._write() as connection:
            row = self._insert(tables.layouts).values(digest=digest, body=body)
            connection.execute(row.on_conflict_do_update(index_elements=["digest"], set_={"body": body}))

    def layout(self, digest: str) -> str:
        """Return a layout's body. Raises `AdapterError` when it is not what its digest says."""
        query = select(tables.layouts.c.body).where(tables.layouts.c.digest == digest)
        with self._read() as connection:
            body: str | None = connection.execute(query).scalar()
        if body is None:
            raise NotFound(f"There is no layout {digest[:12]} in the catalog.")
        # Whole bytes under another layout would be other weights.
        if sha256(body.encode()).hexdigest() != digest:
            raise AdapterError(f"The layout {digest[:12]} is damaged. Export the revision again.")
        return body

    # Releases

    def add_release(self, release: Release) -> None:
        """Start a release.

        Raises `Conflict` when another one of its policy runs or its revision is retired, and `NotFound`
        when the catalog does not have its revision.
        """
        try:
            with self._write() as connection:
                refuse_retired(connection, release.policy, [release.revision])
                refuse_missing(connection, release.policy, [release.revision])
                connection.execute(tables.releases.insert().values(**vars(release)))
                self._tell(connection, release.policy)
        except IntegrityError:
            raise Conflict(
                f"Another release of {release.policy!r} is running. Wait for its verdict, or hold it."
            ) from None

    def release(self, id: str) -> Release:
        release = self._one(Release, select(tables.releases).where(tables.releases.c.id == id))
        if release is None:
            raise NotFound(f"There is no release {id!r}.")
        return release

    def releases(self, policy: str | None = None, open_only: bool = False) -> list[Release]:
        """Return releases, newest first; `open_only` leaves out those that have ended."""
        table = tables.releases.c
        query = select(tables.releases).order_by(table.created_at.desc(), table.id)
        if policy is not None:
            query = query.where(table.policy == policy)
        if open_only:
            query = query.where(table.state == "running")
        return self._all(Release, query)

    def update_release(self, id: str, expected_version: int, **changes: Any) -> Release:
        """Change a release that still has `expected_version`; `Conflict` when it has changed since."""
        table = tables.releases.c
        values = changes | {"version": expected_version + 1, "updated_at": time.time()}
        change = update(tables.releases).where(table.id == id, table.version == expected_version)
        with self._write() as connection:
            row = connection.execute(change.values(**values).returning(tables.releases)).one_or_none()
            if row:
                self._tell(connection, row.policy)
        if row is None:
            raise Conflict(f"Release {id} has changed since version {expected_version}.")
        return Release(**row._mapping)


def _refuse_others(known: Policy, policy: Policy) -> None:
    """Raise `Conflict` when the name is another owner's, or of another base."""
    if known.owner != policy.owner:
        raise Conflict(f"Policy {policy.name!r} belongs to {known.owner!r}; choose another name.")
    if known.base != policy.base:
        raise Conflict(
            f"Policy {policy.name!r} is a line of training on base {known.base[:12]}, not on "
            f"{policy.base[:12]}; choose another name or another state_dir."
        )


def _refuse_purged_names(connection: Connection, names: Sequence[str]) -> None:
    marks = tables.purged.c
    gone = connection.execute(select(tables.purged).where(marks.policy.in_(names)).limit(1)).one_or_none()
    if gone:
        raise Conflict(
            f"The name {gone.policy!r} was purged by {gone.by!r}. Choose another name, or take it again on "
            "purpose."
        )
