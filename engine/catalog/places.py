"""Places: where in the store the bytes of revisions lie, and how rows follow when bytes move.

And layouts: the headers that packed adapters share, by the sha256 of their body.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import Update, bindparam, select, tuple_, update

from engine.catalog import tables
from engine.catalog.access import Access, CatalogPart
from engine.catalog.records import Revision
from engine.catalog.revision_rows import DIGEST_BYTES, PLACE, RevisionRows, blobs, cut, key_of, table
from engine.catalog.withheld import lift_quarantine
from engine.errors import AdapterError, NotFound
from engine.store.segments import Location, room

# Digests as a relation, from one parameter.
SQLITE_DIGESTS = f"""
    WITH RECURSIVE numbers (number) AS (
        SELECT 0 UNION ALL
        SELECT number + 1 FROM numbers WHERE {DIGEST_BYTES} * (number + 1) < length(:digests)
    )
    SELECT {cut("digests", "number")} FROM numbers"""
POSTGRES_DIGESTS = "SELECT unnest(%(digests)s::bytea[])"
# Columns that change when bytes move unchanged.
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
        """Return where bytes of these digests already lie, under any policy, except quarantined ones."""
        stones = tables.quarantine.c
        with self._access.read() as connection:
            values = {"digests": blobs(digests, self._access.is_sqlite)}
            rows = connection.exec_driver_sql(self._find, values).all()
            named, held = {row.digest.hex() for row in rows}, select(stones.digest, stones.policy)
            bad: set[tuple[int, int]] = set()
            for digest, policy in tables.rows_among(connection, held, stones.digest, named):
                row = select(table.segment, table.offset).where(*key_of(policy, digest))
                bad |= {tuple(place) for place in connection.execute(row)}
        segments = self._rows.words({row.segment for row in rows})
        return {
            digest.hex(): Location(segments[segment], offset, length, checksum.hex())
            for digest, segment, offset, length, checksum in rows
            if (segment, offset) not in bad
        }

    def bytes_by_segment(self, page: int = 10_000) -> dict[str, int]:
        """Return the bytes of each segment that rows use, padding included; shared bytes count once."""
        columns = (table.digest, table.policy, table.segment, table.offset, table.length)
        query = select(*columns).order_by(table.digest, table.policy).limit(page)
        used: dict[int, int] = defaultdict(int)
        last, digest, places = (b"", ""), b"", set[tuple[int, int]]()
        with self._access.read() as connection:
            while rows := connection.execute(query.where(tuple_(table.digest, table.policy) > last)).all():
                for row_digest, _, segment, offset, length in rows:
                    if row_digest != digest:
                        digest, places = row_digest, set()
                    if (segment, offset) not in places:
                        places.add((segment, offset))
                        used[segment] += room(length)
                last = (rows[-1].digest, rows[-1].policy)
        segments = self._rows.words(used.keys())
        return {segments[id]: size for id, size in used.items()}

    def replace(self, revision: Revision) -> Revision:
        """Point a known revision's row at the whole bytes of this one, and end its quarantine.

        Return the row, or this one when the catalog does not have it.
        """
        self.replace_many([revision])
        return self._rows.find(revision.policy, revision.digest) or revision

    def move(self, moves: Sequence[tuple[Location, Location]], digests: Sequence[str] | None = None) -> int:
        """Point every row at the first place of a move to the second, in one transaction.

        `digests`, one for each move, says whose bytes they are, which saves a scan of the table. Return how
        many rows changed.
        """
        ids = self._rows.intern(place.segment for move in moves for place in move)
        targets = {(ids[old.segment], old.offset): new for old, new in moves}
        columns = (table.digest, table.policy, table.segment, table.offset)
        query = select(*columns).where(table.segment.in_({segment for segment, _ in targets}))
        with self._access.write() as connection:
            if digests is None:
                rows = list(connection.execute(query))
            else:
                rows = tables.rows_among(connection, query, table.digest, map(bytes.fromhex, set(digests)))
            changes = [
                _placed(row.digest, row.policy, ids[new.segment], new)
                for row in rows
                if (new := targets.get((row.segment, row.offset)))
            ]
            if changes:
                connection.execute(_placing(MOVED), changes)
        return len(changes)

    def replace_many(self, revisions: Sequence[Revision]) -> int:
        """Point known rows at the whole bytes of these and end their quarantine, in one transaction.

        Return how many rows there were; a deleted one stays deleted.
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
        """Return which of these segments no row names, now or later.

        The caller holds their claims, so that nobody appends to them; and bytes can only be shared through a
        row that names them. Scans the table once, without blocking writers.
        """
        self._settle()
        ids = self._rows.intern(segments)
        query = select(table.segment).where(table.segment.in_(ids.values())).distinct()
        with self._access.read() as connection:
            used = set(connection.execute(query).scalars())
        return {segment for segment, id in ids.items() if id not in used}

    def _settle(self) -> None:
        """Wait for commits under way; make SQLite discard one that a kill cut short.

        Its frames may be whole in the write-ahead log though no reader sees them yet. Recovery of the log
        would bring them back, naming bytes that are gone. A commit of our own overwrites them.
        """
        with self._access.write() as connection:
            if self._access.is_sqlite:
                version = connection.exec_driver_sql("PRAGMA user_version").scalar() or 0
                connection.exec_driver_sql(f"PRAGMA user_version = {(version + 1) % (1 << 31)}")


def _placing(names: Collection[str]) -> Update:
    """Return an update of these columns, to `new_COLUMN`, of the row with the key (`key`, `of`)."""
    mine = (table.digest == bindparam("key")) & (table.policy == bindparam("of"))
    return update(tables.revisions).where(mine).values({name: bindparam(f"new_{name}") for name in names})


def _placed(digest: bytes, policy: str, segment: int, at: Location | Revision) -> dict[str, Any]:
    """Return the parameters of `_placing` for a row whose bytes lie at `at`, in the segment with this id."""
    return {
        "key": digest,
        "of": policy,
        "new_segment": segment,
        "new_offset": at.offset,
        "new_length": at.length,
        "new_checksum": bytes.fromhex(at.checksum),
    }


@dataclass(frozen=True)
class Layout:
    """A layout's body and its sha256, in hex."""

    digest: str
    body: str


class Layouts(CatalogPart):
    """The catalog's layouts; `catalog.layouts`."""

    def add(self, digest: str, body: str) -> None:
        """Add a layout by the sha256 of its body; a damaged body is replaced."""
        self._access.change(self._access.put(tables.layouts, Layout(digest, body)))

    def get(self, digest: str) -> str:
        """Return a layout's body; `NotFound` when there is none, `AdapterError` when it fails its digest."""
        query = select(tables.layouts.c.body).where(tables.layouts.c.digest == digest)
        body: str | None = self._access.scalar(query)
        if body is None:
            raise NotFound(f"There is no layout {digest[:12]} in the catalog.")
        # Whole bytes read by another layout would be other weights.
        if sha256(body.encode()).hexdigest() != digest:
            raise AdapterError(f"The layout {digest[:12]} is damaged. Export the revision again.")
        return body
