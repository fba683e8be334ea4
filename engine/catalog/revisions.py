"""Revisions: published in batches, found by digest prefix, walked page by page.

A revision's row is the commit point of its bytes. Every walk is in pages by key, so that no caller
holds a million rows.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, literal, select, tuple_, update

from engine.catalog import tables
from engine.catalog.nearest import Nearest
from engine.catalog.records import STATES, Revision
from engine.catalog.row_codec import COLUMNS, PLACE, SEGMENT, blob, encode, prefix_range, words
from engine.errors import Moved, NotFound, Purged
from engine.settings.params import POLICY_NAME, served_name
from engine.store.segments import room

SNAPSHOT, EXPORTED = (STATES.index(state) for state in ("snapshot", "exported"))
# Digests for one query.
CHUNK = 1024
# Up to so few digits a policy's own index is read, since many digests begin so.
SHORT_PREFIX = 3
CANDIDATES = 10
LAST_ID = (1 << 31) - 1
table = tables.revisions.c
# Of one time, the row that came last is the newest.
NEWEST_FIRST = table.created_at.desc(), table.id.desc()


class Revisions(Nearest):
    """The catalog's revisions; part of `Catalog`."""

    def __init__(self, url: str):
        super().__init__(url)
        mark, names = self._mark, ", ".join(f'"{column.name}"' for column in COLUMNS)
        values = ", ".join([mark] * len(COLUMNS))
        self._add = f"INSERT INTO revisions ({names}) VALUES ({values}) ON CONFLICT DO NOTHING"
        find = f"SELECT {names} FROM revisions WHERE digest >= {mark} AND digest <= {mark}"
        # With the expression no index on policies can be taken, so it is the range of the key.
        self._find = f"{find} AND policy || '' = {mark} LIMIT {CANDIDATES + 1}"
        self._find_short = f"{find} AND policy = {mark} LIMIT {CANDIDATES + 1}"

    def add_revision(self, revision: Revision) -> bool:
        """Publish a revision; its bytes must be in the store already. Return whether it is new.

        A known snapshot that comes again as `exported` is one from now on and expires when that one
        does; as a snapshot it expires at the later of the two times.
        """
        return self.add_revisions([revision])[0]

    def add_revisions(self, rows: Sequence[Revision], shared: Collection[str] = ()) -> list[bool]:
        """Publish revisions in one transaction; return which of them are new.

        `shared` holds the digests whose bytes were not appended but found by `places`. Raises `Moved`
        when no row names such a place any more, and `Purged` for purged policies: nothing is written.
        """
        ids = self._intern(word for row in rows for word in words(row))
        values = [encode(row, ids) for row in rows]
        with self._write() as connection:
            refuse_purged(connection, {row.policy for row in rows})
            for row, value in zip(rows, values, strict=True):
                if row.digest in shared and not _is_named(connection, value):
                    raise moved(row.policy, row.digest)
            is_new = [connection.exec_driver_sql(self._add, value).rowcount == 1 for value in values]
            # What was said of the bytes of a row that is gone says nothing of this one's.
            lift_quarantine(connection, [(row.policy, row.digest) for row in compress(rows, is_new)])
            publish_again(connection, [row for row, new in zip(rows, is_new, strict=True) if not new])
        return is_new

    def move_revision(self, revision: Revision) -> Revision:
        """Let a known revision's row name the whole bytes that this one names; it leaves quarantine.

        Return the row, or this one when the catalog does not know it.
        """
        ids = self._intern(words(revision))
        values = dict(zip((column.name for column in COLUMNS), encode(revision, ids), strict=True))
        change = update(tables.revisions).where(*key_of(revision.policy, revision.digest))
        stones = tables.quarantine
        mine = (stones.c.policy == revision.policy) & (stones.c.digest == revision.digest)
        with self._write() as connection:
            moved = change.values({name: values[name] for name in PLACE}).returning(*COLUMNS)
            rows = connection.execute(moved).all()
            connection.execute(stones.delete().where(mine))
        return self._revisions(rows)[0] if rows else revision

    def revision(self, policy: str, digest_prefix: str) -> Revision:
        """Return the one revision whose digest begins so.

        Raises `NotFound` with the nearest names, or `Ambiguous` with the candidates when several do.
        """
        between = prefix_range(digest_prefix)
        if between is None or not POLICY_NAME.fullmatch(policy):
            raise self.missing(policy, digest_prefix)
        query = self._find if len(digest_prefix) > SHORT_PREFIX else self._find_short
        rows = self._quick(query, (*between, policy))
        if not rows:
            raise self.missing(policy, digest_prefix)
        found = self._revisions(rows)
        if len(found) > 1:
            raise self.ambiguous(policy, digest_prefix, [row.digest for row in found[:CANDIDATES]])
        return found[0]

    def find(self, policy: str, digest: str) -> Revision | None:
        """Return the revision with this whole digest."""
        rows = self._rows(select(*COLUMNS).where(*key_of(policy, digest)))
        return rows[0] if rows else None

    def revisions(
        self,
        policy: str,
        after: Revision | None = None,
        limit: int = 100,
        owner: str | None = None,
        retired: bool = False,
    ) -> list[Revision]:
        """Return a page of revisions, newest first; `after` is the last one of the page before.

        `retired` takes those in that are; `owner` leaves all others' out.
        """
        query = select(*COLUMNS).where(table.policy == policy)
        if after is not None:
            # A row that is gone by now: those of its time come again rather than not at all.
            place = select(table.id).where(*key_of(policy, after.digest)).scalar_subquery()
            last = tuple_(literal(after.created_at), func.coalesce(place, LAST_ID))
            query = query.where(tuple_(table.created_at, table.id) < last)
        if owner is not None:
            names = tables.names.c
            query = query.where(table.owner == select(names.id).where(names.name == owner).scalar_subquery())
        if not retired:
            query = query.where(table.retired_at.is_(None))
        return self._rows(query.order_by(*NEWEST_FIRST).limit(limit))

    def every_revision(self, after: tuple[str, str] | None = None, limit: int = 1000) -> list[Revision]:
        """Return a page of all revisions, in the order of digest and policy.

        `after` is (digest, policy) of the last one of the page before.
        """
        query = select(*COLUMNS).order_by(table.digest, table.policy).limit(limit)
        if after is not None:
            query = query.where(tuple_(table.digest, table.policy) > (blob(after[0]), after[1]))
        return self._rows(query)

    def used_bytes_by_segment(self, page: int = 10_000) -> dict[str, int]:
        """Return how much room of each segment rows take; what several rows share counts once."""
        columns = (table.digest, table.policy, table.segment, table.offset, table.length)
        query = select(*columns).order_by(table.digest, table.policy).limit(page)
        used: dict[int, int] = defaultdict(int)
        last, digest, places = (b"", ""), b"", set[tuple[int, int]]()
        with self._read() as connection:
            while rows := connection.execute(query.where(tuple_(table.digest, table.policy) > last)).all():
                for found, _, segment, offset, length in rows:
                    if found != digest:
                        digest, places = found, set()
                    if (segment, offset) not in places:
                        places.add((segment, offset))
                        used[segment] += room(length)
                last = (rows[-1].digest, rows[-1].policy)
        segments = self._words(used.keys())
        return {segments[id]: size for id, size in used.items()}

    def parents(self, policy: str, digest: str, limit: int = 100) -> list[Revision]:
        """Return the known revisions that this one was trained from, its parent first."""
        found: list[Revision] = []
        row = self.find(policy, digest)
        while row and row.parent and len(found) < limit:
            if row := self.find(policy, row.parent):
                found.append(row)
        return found

    def children(self, policy: str, digest: str, limit: int = 100) -> list[Revision]:
        """Return the exported revisions that were trained from this one, oldest first."""
        query = select(*COLUMNS).where(
            table.parent == blob(digest), table.policy == policy, table.state == EXPORTED
        )
        return self._rows(query.order_by(table.created_at, table.digest).limit(limit))

    def set_probe(self, policy: str, digest: str, result: dict[str, Any]) -> None:
        self._change(policy, digest, probe=result)

    def _change(self, policy: str, digest: str, **values: Any) -> None:
        """Change a revision's row; `NotFound` when there is none."""
        with self._write() as connection:
            change = update(tables.revisions).where(*key_of(policy, digest)).values(values)
            done = connection.execute(change).rowcount
        if not done:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")

    def _rows(self, query: Any) -> list[Revision]:
        with self._read(self._single) as connection:
            rows = connection.execute(query).all()
        return self._revisions(rows)


def moved(policy: str, digest: str) -> Moved:
    return Moved(
        f"The bytes that {served_name(policy, digest)} was to share lie elsewhere now. "
        "Look them up and register again."
    )


def _is_named(connection: Connection, value: Sequence[Any]) -> bool:
    """Say whether a row names the bytes that this one names."""
    _, digest, *_ = value
    segment, offset = value[SEGMENT : SEGMENT + 2]
    there = table.digest == digest, table.segment == segment, table.offset == offset
    return connection.execute(select(table.id).where(*there).limit(1)).first() is not None


def key_of(policy: str, digest: str) -> tuple[Any, Any]:
    return table.digest == blob(digest), table.policy == policy


def lift_quarantine(connection: Connection, revisions: Iterable[tuple[str, str]]) -> None:
    """End the quarantine of those of these revisions (policy, digest) that are in it."""
    stones = tables.quarantine.c
    if connection.execute(select(stones.policy).limit(1)).first() is None:
        return
    wanted = list(revisions)
    query = select(stones.policy, stones.digest)
    for at in range(0, len(wanted), CHUNK):
        some = wanted[at : at + CHUNK]
        held = connection.execute(query.where(stones.digest.in_({digest for _, digest in some}))).all()
        lifted = [{"of": of, "key": key} for of, key in held if (of, key) in some]
        if lifted:
            mine = (stones.policy == bindparam("of")) & (stones.digest == bindparam("key"))
            connection.execute(delete(tables.quarantine).where(mine), lifted)


def publish_again(connection: Connection, rows: Sequence[Revision]) -> None:
    """Let known snapshots that come again expire later, or be exported."""
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


def refuse_purged(connection: Connection, policies: Collection[str]) -> None:
    """Raise `Purged` when some of these policies are."""
    gone, known = tables.purged.c, tables.policies.c
    if connection.execute(select(gone.policy).limit(1)).first() is None:
        return
    there = select(known.name).where(known.name == gone.policy)
    query = select(gone.policy).where(~there.exists()).order_by(gone.policy)
    wanted, found = list(policies), list[str]()
    for at in range(0, len(wanted), CHUNK):
        found += connection.execute(query.where(gone.policy.in_(wanted[at : at + CHUNK]))).scalars()
    if found:
        raise Purged(
            f"Policy {found[0]!r} was purged. Create it again to publish revisions of it.", tuple(found)
        )
