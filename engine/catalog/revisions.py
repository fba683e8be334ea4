"""Revisions: published in batches, found by digest prefix, listed page by page.

A revision's row is the commit point of its bytes. Lists are paged by key, so that no caller holds a million
rows.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import chain, compress
from typing import Any

from sqlalchemy import Connection, bindparam, func, literal, select, tuple_, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.places import Layout
from engine.catalog.purges import refuse_purged
from engine.catalog.records import Revision, served_name
from engine.catalog.revision_rows import (
    CANDIDATES,
    COLUMNS,
    EXPORTED,
    NEWEST_FIRST,
    SEGMENT,
    SNAPSHOT,
    RevisionRows,
    blob,
    encode,
    key_of,
    table,
    words,
)
from engine.catalog.unknown_names import UnknownNames
from engine.catalog.withheld import lift_quarantine
from engine.errors import Moved

LAST_ID = (1 << 31) - 1
# Rows of a statement. Each statement gives the GIL away once, and a thread beside a busy one waits to have it
# back; SQLite takes 32,766 parameters.
ROWS = 1500


class Revisions:
    """The catalog's revisions; `catalog.revisions`."""

    def __init__(self, access: Access, rows: RevisionRows, names: UnknownNames):
        self._access = access
        self._rows = rows
        # What `get` returns and what withholds it; None where there is none, without an error's suggestions.
        self.standing = rows.standing
        # The revision with this whole digest; None when there is none.
        self.find = rows.find
        self._unknown = names
        columns = ", ".join(f'"{column.name}"' for column in COLUMNS)
        row = f"({', '.join([access.mark] * len(COLUMNS))})"
        # The statement that adds so many rows.
        self._add = lru_cache(8)(
            lambda count: (
                f"INSERT INTO revisions ({columns}) VALUES {', '.join([row] * count)} ON CONFLICT DO NOTHING"
            )
        )

    def add_many(
        self, rows: Sequence[Revision], shared: Collection[str] = (), layouts: Sequence[Layout] = ()
    ) -> list[bool]:
        """Publish revisions, whose bytes are in the store, in one transaction; return which are new.

        A known snapshot that is published again as `exported` becomes exported and takes the new expiry; as a
        snapshot it expires at the later of the two times. `shared` holds the digests whose bytes were not
        appended but are another row's. `layouts` are added with the rows, as `Layouts.add` does. Raises
        `Moved` when no row names such bytes any more, and `Purged` for purged policies; then nothing is
        written.
        """
        ids = self._rows.intern(word for row in rows for word in words(row))
        values = [encode(row, ids) for row in rows]
        with self._access.write() as connection:
            any_purged, any_held = marks(connection)
            if any_purged:
                refuse_purged(connection, {row.policy for row in rows})
            for layout in layouts:
                connection.execute(self._access.put(tables.layouts, layout))
            if shared:
                borrowed = [value for row, value in zip(rows, values, strict=True) if row.digest in shared]
                refuse_moved(connection, borrowed)
            is_new = self._insert(connection, values)
            if any_held:
                # A quarantine left by a deleted row says nothing about these bytes.
                lift_quarantine(connection, [(row.policy, row.digest) for row in compress(rows, is_new)])
            publish_again(connection, [row for row, new in zip(rows, is_new, strict=True) if not new])
        return is_new

    def _insert(self, connection: Connection, values: list[tuple[Any, ...]]) -> list[bool]:
        """Insert rows; return which were not there. Of two with one key the first is new."""
        if not values:
            return []
        last = connection.scalar(select(func.coalesce(func.max(table.id), 0)))
        added = 0
        for start in range(0, len(values), ROWS):
            rows = values[start : start + ROWS]
            parameters = tuple(chain.from_iterable(rows))
            added += connection.exec_driver_sql(self._add(len(rows)), parameters).rowcount
        if added == len(values):
            return [True] * len(values)
        query = select(table.policy, table.digest).where(table.id > last)
        keys = {tuple(row) for row in connection.execute(query)}
        is_new = []
        for key in ((value[0], value[1]) for value in values):
            is_new.append(key in keys)
            keys.discard(key)
        return is_new

    def get(self, policy: str, digest_prefix: str) -> Revision:
        """Return the one revision whose digest starts with this prefix.

        Raises `NotFound`, or `Ambiguous` with the candidates when there are several.
        """
        standing = self.standing(policy, digest_prefix)
        if standing is None:
            raise self._unknown.missing(policy, digest_prefix)
        return standing.revision

    def copies(self, policy: str, digest: str) -> list[tuple[Revision, bool]]:
        """Return rows of this whole digest, the policy's own first, and whether each is in quarantine.

        There may be thousands under other policies; `CANDIDATES` are enough to share their bytes.
        """
        stones = tables.quarantine.c
        is_held = (stones.policy == table.policy) & (stones.digest == digest)
        query = select(*COLUMNS, stones.reason).outerjoin(tables.quarantine, is_held)
        query = (
            query.where(table.digest == blob(digest))
            .order_by(table.policy != policy, stones.reason.is_not(None))
            .limit(CANDIDATES)
        )
        with self._access.read(self._access.single) as connection:
            rows = connection.execute(query).all()
        revisions = self._rows.decode([row[:-1] for row in rows])
        return [(row, reason is not None) for row, (*_, reason) in zip(revisions, rows, strict=True)]

    def page(
        self,
        policy: str,
        after: Revision | None = None,
        limit: int = 100,
        owner: str | None = None,
        retired: bool = False,
    ) -> list[Revision]:
        """Return a page of revisions, newest first; `after` is the last one of the page before.

        `retired` includes retired ones; `owner` leaves out those of others.
        """
        query = select(*COLUMNS).where(table.policy == policy)
        if after is not None:
            # If that row was deleted, rows of its time are repeated rather than skipped.
            place = select(table.id).where(*key_of(policy, after.digest)).scalar_subquery()
            last = tuple_(literal(after.created_at), func.coalesce(place, LAST_ID))
            query = query.where(tuple_(table.created_at, table.id) < last)
        if owner is not None:
            names = tables.names.c
            query = query.where(table.owner == select(names.id).where(names.name == owner).scalar_subquery())
        if not retired:
            query = query.where(table.retired_at.is_(None))
        return self._rows.select(query.order_by(*NEWEST_FIRST).limit(limit))

    def scan(self, after: tuple[str, str] | None = None, limit: int = 1000) -> list[Revision]:
        """Return a page of all revisions, in the order of digest and policy.

        `after` is (digest, policy) of the last one of the page before.
        """
        query = select(*COLUMNS).order_by(table.digest, table.policy).limit(limit)
        if after is not None:
            query = query.where(tuple_(table.digest, table.policy) > (blob(after[0]), after[1]))
        return self._rows.select(query)

    def set_probe(self, policy: str, digest: str, result: dict[str, Any]) -> None:
        """Record the result of a revision's effect probe; `NotFound` when there is no such revision."""
        self._rows.change(policy, digest, probe=result)


def marks(connection: Connection) -> tuple[bool, bool]:
    """Say whether any policy is purged, and any revision in quarantine: mostly none is."""
    query = select(select(tables.purged.c.policy).exists(), select(tables.quarantine.c.policy).exists())
    any_purged, any_held = connection.execute(query).one()
    return any_purged, any_held


def refuse_moved(connection: Connection, borrowed: Sequence[tuple[Any, ...]]) -> None:
    """Raise `Moved` if one of these rows shares bytes that no row names any more."""
    query = select(table.digest, table.segment, table.offset).distinct()
    digests = sorted({value[1] for value in borrowed})
    named = {tuple(row) for row in tables.rows_among(connection, query, table.digest, digests)}
    for value in borrowed:
        if (value[1], *value[SEGMENT : SEGMENT + 2]) not in named:
            name = served_name(value[0], value[1].hex())
            raise Moved(f"The bytes that {name} was to share have moved. Register the revision again.")


def publish_again(connection: Connection, rows: Sequence[Revision]) -> None:
    """Update known snapshots that are published again: extend their expiry, or export them."""
    snapshots = update(tables.revisions).where(
        table.digest == bindparam("key"), table.policy == bindparam("of"), table.state == SNAPSHOT
    )
    changes: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for row in rows:
        if row.state == "exported" or row.expires_at is not None:
            key = {"key": blob(row.digest), "of": row.policy, "until": row.expires_at}
            changes[row.state == "exported"].append(key)
    if changes[True]:
        connection.execute(snapshots.values(state=EXPORTED, expires_at=bindparam("until")), changes[True])
    if changes[False]:
        sooner = snapshots.where(table.expires_at < bindparam("until"))
        connection.execute(sooner.values(expires_at=bindparam("until")), changes[False])
