"""Places: where in the store the bytes of revisions lie, and how rows follow when bytes move."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Update, bindparam, select, tuple_, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.quarantine import lift_quarantine
from engine.catalog.records import Revision
from engine.catalog.revision_rows import RevisionRows, key_of, table
from engine.catalog.row_codec import DIGEST_BYTES, PLACE, blobs, cut
from engine.store.segments import Location, room

# Digests as a relation, from one value.
SQLITE_DIGESTS = f"""
    WITH RECURSIVE numbers (number) AS (
        SELECT 0 UNION ALL
        SELECT number + 1 FROM numbers WHERE {DIGEST_BYTES} * (number + 1) < length(:digests)
    )
    SELECT {cut("digests", "number")} FROM numbers"""
POSTGRES_DIGESTS = "SELECT unnest(%(digests)s::bytea[])"
# Digests of one query: of those whose places are looked up, and of those whose rows follow a move.
NAMES, MOVES = 1024, 10_000
# What of a row changes when its bytes move as they are.
MOVED = ("segment", "offset", "length", "checksum")


class Places:
    """The places of revisions' bytes; `catalog.places`."""

    def __init__(self, access: Access, rows: RevisionRows):
        self._access = access
        self._rows = rows
        digests = SQLITE_DIGESTS if access.is_sqlite else POSTGRES_DIGESTS
        self._find = f"""
            SELECT DISTINCT digest, segment, "offset", length, checksum FROM revisions
            WHERE digest IN ({digests})"""

    def find(self, digests: Sequence[str]) -> dict[str, Location]:
        """Return where bytes of these digests lie already, whatever their policy; no quarantined ones."""
        stones = tables.quarantine.c
        with self._access.read() as connection:
            values = {"digests": blobs(digests, self._access.is_sqlite)}
            rows = connection.exec_driver_sql(self._find, values).all()
            named = list({row.digest.hex() for row in rows})
            bad: set[tuple[int, int]] = set()
            for at in range(0, len(named), NAMES):
                held = select(stones.digest, stones.policy).where(stones.digest.in_(named[at : at + NAMES]))
                for digest, policy in connection.execute(held).all():
                    row = select(table.segment, table.offset).where(*key_of(policy, digest))
                    bad |= {tuple(place) for place in connection.execute(row)}
        segments = self._rows.words({row.segment for row in rows})
        return {
            digest.hex(): Location(segments[segment], offset, length, checksum.hex())
            for digest, segment, offset, length, checksum in rows
            if (segment, offset) not in bad
        }

    def bytes_by_segment(self, page: int = 10_000) -> dict[str, int]:
        """Return how much room of each segment rows take; what several rows share counts once."""
        columns = (table.digest, table.policy, table.segment, table.offset, table.length)
        query = select(*columns).order_by(table.digest, table.policy).limit(page)
        used: dict[int, int] = defaultdict(int)
        last, digest, places = (b"", ""), b"", set[tuple[int, int]]()
        with self._access.read() as connection:
            while rows := connection.execute(query.where(tuple_(table.digest, table.policy) > last)).all():
                for found, _, segment, offset, length in rows:
                    if found != digest:
                        digest, places = found, set()
                    if (segment, offset) not in places:
                        places.add((segment, offset))
                        used[segment] += room(length)
                last = (rows[-1].digest, rows[-1].policy)
        segments = self._rows.words(used.keys())
        return {segments[id]: size for id, size in used.items()}

    def replace(self, revision: Revision) -> Revision:
        """Let a known revision's row name the whole bytes that this one names; it leaves quarantine.

        Return the row, or this one when the catalog does not know it.
        """
        self.replace_many([revision])
        return self._rows.find(revision.policy, revision.digest) or revision

    def move(self, moves: Sequence[tuple[Location, Location]], digests: Sequence[str] | None = None) -> int:
        """Let every row that names the first place of a move name the second, in one transaction.

        `digests` (one for each move: whose bytes they are) spares reading the whole table. Returns
        how many rows have changed.
        """
        ids = self._rows.intern(place.segment for move in moves for place in move)
        targets = {(ids[old.segment], old.offset): new for old, new in moves}
        columns = (table.digest, table.policy, table.segment, table.offset)
        query = select(*columns).where(table.segment.in_({segment for segment, _ in targets}))
        queries = [query]
        if digests is not None:
            wanted = [bytes.fromhex(digest) for digest in set(digests)]
            chunks = (wanted[at : at + MOVES] for at in range(0, len(wanted), MOVES))
            queries = [query.where(table.digest.in_(chunk)) for chunk in chunks]
        with self._access.write() as connection:
            rows = [row for query in queries for row in connection.execute(query)]
            changes = [
                _placed(row.digest, row.policy, ids[new.segment], new)
                for row in rows
                if (new := targets.get((row.segment, row.offset)))
            ]
            if changes:
                connection.execute(_placing(MOVED), changes)
        return len(changes)

    def replace_many(self, revisions: Sequence[Revision]) -> int:
        """Let the rows of known revisions name the whole bytes that these name, all in one transaction.

        They leave quarantine. Returns how many there were; one that is gone meanwhile stays so.
        """
        ids = self._rows.intern(word for row in revisions for word in (row.layout, row.segment))
        changes = [
            _placed(bytes.fromhex(row.digest), row.policy, ids[row.segment], row)
            | {"new_layout": ids[row.layout]}
            for row in revisions
        ]
        if not changes:
            return 0
        with self._access.write() as connection:
            placed = connection.execute(_placing(PLACE), changes).rowcount
            lift_quarantine(connection, ((row.policy, row.digest) for row in revisions))
        return placed

    def unused_segments(self, segments: Collection[str]) -> set[str]:
        """Return those of these segments that no row names, now or later.

        The caller claims them, so that nobody appends to them; and who shares bytes in one needs a row
        that names it. Reads the whole table once, and keeps no writer waiting meanwhile.
        """
        self._settle()
        ids = self._rows.intern(segments)
        query = select(table.segment).where(table.segment.in_(ids.values())).distinct()
        with self._access.read() as connection:
            used = set(connection.execute(query).scalars())
        return {segment for segment, id in ids.items() if id not in used}

    def _settle(self) -> None:
        """Wait for commits under way; have SQLite forget one that a kill cut short.

        Its frames may be whole in the write-ahead log though no reader sees them yet; once the log is
        recovered they would name bytes that are gone. A commit of our own takes their place in the log.
        """
        with self._access.write() as connection:
            if self._access.is_sqlite:
                version = connection.exec_driver_sql("PRAGMA user_version").scalar() or 0
                connection.exec_driver_sql(f"PRAGMA user_version = {(version + 1) % (1 << 31)}")


def _placing(names: Collection[str]) -> Update:
    """Return an update of these columns of the row with the key `key`, `of`, to `new_` and their names."""
    mine = (table.digest == bindparam("key")) & (table.policy == bindparam("of"))
    return update(tables.revisions).where(mine).values({name: bindparam(f"new_{name}") for name in names})


def _placed(digest: bytes, policy: str, segment: int, at: Location | Revision) -> dict[str, Any]:
    """Return what `_placing` takes of a row whose bytes lie there, in the segment with this id."""
    return {
        "key": digest,
        "of": policy,
        "new_segment": segment,
        "new_offset": at.offset,
        "new_length": at.length,
        "new_checksum": bytes.fromhex(at.checksum),
    }
