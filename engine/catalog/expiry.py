"""Retirement and expiry of revisions. Routes, releases and tombstones in force protect a row."""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Table, delete, select, tuple_, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell
from engine.catalog.records import Revision
from engine.catalog.revision_rows import COLUMNS, RevisionRows, key_of, table
from engine.catalog.withheld import lift_quarantine
from engine.errors import Conflict, NotFound

# Revisions that one call expires, and rows of one write transaction, for which other writers wait.
CHUNK = 10_000
EXPIRE_CHUNK = 1_000
# Columns of a route and of a release that name a revision; conditions for those in force.
ROUTED = ("champion", "previous", "canary")
RELEASED = ("revision", "baseline")
RUNNING, BURIED = tables.releases.c.state == "running", tables.tombstones.c.lifted_at.is_(None)


class Lifecycle:
    """The catalog's retirement and expiry of revisions; `catalog.lifecycle`."""

    def __init__(self, access: Access, rows: RevisionRows):
        self._access = access
        self._rows = rows

    def retire(self, policy: str, digest: str, by: str, reason: str, back: bool = False) -> Revision:
        """Stop serving a revision, except for scoring, or serve a retired one again (`back`).

        The first reason stays; the row of one that is back keeps who did it, and why. Raises `Conflict` while
        a route or a running release names what is to be retired, `NotFound` when there is none.
        """
        with self._access.write() as connection:
            named = _named(connection, tables.routes, ROUTED, {policy})
            named |= _named(connection, tables.releases, RELEASED, {policy}, RUNNING)
            if not back and (policy, digest) in named:
                raise Conflict(
                    f"Revision {digest[:12]} of {policy!r} is routed or in a running release. Route another "
                    "revision first (`graftwork decide restore`)."
                )
            at = None if back else time.time()
            values = {"retired_at": at, "retired_by": by, "retired_reason": reason}
            is_other = table.retired_at.is_not(None) if back else table.retired_at.is_(None)
            change = update(tables.revisions).where(*key_of(policy, digest), is_other)
            if connection.execute(change.values(values)).rowcount:
                tell(connection, policy)
                action = "revision.unretire" if back else "revision.retire"
                self._access.record(connection, action, f"{policy}@{digest}", None, values)
        return self._revision(policy, digest)

    def set_expiry(self, policy: str, digest: str, expires_at: float | None) -> None:
        """Set when a revision expires (epoch seconds); None: never."""
        self._rows.change(policy, digest, expires_at=expires_at)

    def expire(self, now: float, limit: int = CHUNK) -> list[Revision]:
        """Remove and return at most `limit` revisions that expired before `now` and that nothing names.

        A route, a release (running or ended) or a tombstone in force names a revision.
        """
        key = (table.expires_at, table.digest, table.policy)
        after: tuple[Any, ...] | None = None
        removed: list[Revision] = []
        while len(removed) < limit:
            most = min(EXPIRE_CHUNK, limit - len(removed))
            query = select(*COLUMNS).where(table.expires_at < now).order_by(*key).limit(most)
            with self._access.read() as connection:
                rows = connection.execute(query.where(tuple_(*key) > after) if after else query).all()
            if not rows:
                break
            after = (rows[-1].expires_at, rows[-1].digest, rows[-1].policy)
            removed += self._remove_unnamed(self._rows.decode(rows), now)
        return removed

    def _remove_unnamed(self, rows: Sequence[Revision], now: float) -> list[Revision]:
        policies = {row.policy for row in rows}
        with self._access.write() as connection:
            named = _named(connection, tables.routes, ROUTED, policies)
            named |= _named(connection, tables.releases, RELEASED, policies)
            named |= _named(connection, tables.tombstones, ("digest",), policies, BURIED)
            removed = []
            for row in rows:
                if (row.policy, row.digest) not in named:
                    # Its expiry may have been changed since it was read.
                    gone = delete(tables.revisions).where(
                        *key_of(row.policy, row.digest), table.expires_at < now
                    )
                    if connection.execute(gone).rowcount:
                        removed.append(row)
            lift_quarantine(connection, ((row.policy, row.digest) for row in removed))
            for policy in {row.policy for row in removed}:
                tell(connection, policy)
        return removed

    def _revision(self, policy: str, digest: str) -> Revision:
        row = self._rows.find(policy, digest)
        if row is None:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")
        return row


def _named(
    connection: Connection, rows: Table, columns: Sequence[str], policies: set[str], *which: Any
) -> set[tuple[str, str]]:
    """Return the revisions (policy, digest) that these columns name in the rows that match `which`."""
    query = select(rows.c.policy, *(rows.c[name] for name in columns)).distinct()
    matches = connection.execute(query.where(rows.c.policy.in_(policies), *which))
    return {(row.policy, digest) for row in matches for digest in row[1:] if digest}
