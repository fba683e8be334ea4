"""The end of revisions: retirement, expiry, quarantine, new places of their bytes, purge of a policy.

Knows what protects a row: a route, a release, a tombstone in force. Knows nothing of files.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Update, bindparam, delete, select, tuple_, update

from engine.catalog import tables
from engine.catalog.records import Revision
from engine.catalog.revisions import Revisions, key_of, lift_quarantine, table
from engine.catalog.row_codec import COLUMNS, PLACE
from engine.errors import Conflict, NotFound
from engine.store.segments import Location

# Rows of one write transaction: others wait for it.
CHUNK = 10_000
EXPIRE_CHUNK = 1_000
# Columns of a route and of a release that name a revision.
ROUTED = ("champion", "previous", "canary")
RELEASED = ("revision", "baseline")
# What of a row changes when its bytes move as they are.
MOVED = ("segment", "offset", "length", "checksum")
# Of what a purge removes last, what gateways read.
TOLD = frozenset({"releases", "tombstones"})


class Lifecycle(Revisions):
    """The catalog's changes to what a revision may still do; part of `Catalog`."""

    # Retirement and expiry

    def retire(self, policy: str, digest: str, by: str, reason: str) -> Revision:
        """Serve a revision to nobody but scoring from now on; keeps the first reason.

        Raises `Conflict` while a route or a running release names it.
        """
        with self._write() as connection:
            named = _routed(connection, {policy}) | _released(connection, {policy}, running=True)
            if (policy, digest) in named:
                raise Conflict(
                    f"Revision {digest[:12]} of {policy!r} is routed or in a running release. Put another "
                    "one in its place first (`graftwork restore`)."
                )
            values = {"retired_at": time.time(), "retired_by": by, "retired_reason": reason}
            change = update(tables.revisions).where(*key_of(policy, digest), table.retired_at.is_(None))
            if connection.execute(change.values(values)).rowcount:
                self._tell(connection, policy)
        return self._found(policy, digest)

    def unretire(self, policy: str, digest: str, by: str, reason: str) -> Revision:
        """Let a retired revision be served again; its row keeps who did it, and why."""
        with self._write() as connection:
            values: dict[str, Any] = {"retired_at": None, "retired_by": by, "retired_reason": reason}
            change = update(tables.revisions).where(*key_of(policy, digest), table.retired_at.is_not(None))
            if connection.execute(change.values(values)).rowcount:
                self._tell(connection, policy)
        return self._found(policy, digest)

    def set_expiry(self, policy: str, digest: str, expires_at: float | None) -> None:
        """Let a revision expire at a time (epoch seconds), or never."""
        self._change(policy, digest, expires_at=expires_at)

    def expire(self, now: float, limit: int = CHUNK) -> list[Revision]:
        """Remove and return at most `limit` revisions that have expired and that nothing names.

        What names one is a route, a release, running or not, or a tombstone in force.
        """
        key = (table.expires_at, table.digest, table.policy)
        after: tuple[Any, ...] | None = None
        removed: list[Revision] = []
        while len(removed) < limit:
            most = min(EXPIRE_CHUNK, limit - len(removed))
            query = select(*COLUMNS).where(table.expires_at < now).order_by(*key).limit(most)
            with self._read() as connection:
                rows = connection.execute(query.where(tuple_(*key) > after) if after else query).all()
            if not rows:
                break
            after = (rows[-1].expires_at, rows[-1].digest, rows[-1].policy)
            removed += self._remove_unnamed(self._revisions(rows), now)
        return removed

    def _remove_unnamed(self, rows: Sequence[Revision], now: float) -> list[Revision]:
        policies = {row.policy for row in rows}
        with self._write() as connection:
            named = _routed(connection, policies) | _released(connection, policies, running=False)
            named |= _buried(connection, policies)
            removed = []
            for row in rows:
                if (row.policy, row.digest) not in named:
                    # Its time may have been set anew since it was read.
                    gone = delete(tables.revisions).where(
                        *key_of(row.policy, row.digest), table.expires_at < now
                    )
                    if connection.execute(gone).rowcount:
                        removed.append(row)
            lift_quarantine(connection, ((row.policy, row.digest) for row in removed))
            for policy in {row.policy for row in removed}:
                self._tell(connection, policy)
        return removed

    # Bytes

    def quarantine(self, policy: str, digest: str, reason: str) -> None:
        """Keep a revision from being served: its bytes are damaged. The first reason stays.

        Gateways are told, and let it go where they have it already.
        """
        row = {"policy": policy, "digest": digest, "reason": reason, "at": time.time()}
        with self._write() as connection:
            stone = self._insert(tables.quarantine).values(row).on_conflict_do_nothing()
            if connection.execute(stone).rowcount:
                self._tell(connection, policy)

    def quarantined(self, policy: str, digest: str) -> str | None:
        """Return why a revision is in quarantine; None when it is not."""
        query = f"SELECT reason FROM quarantine WHERE policy = {self._mark} AND digest = {self._mark}"
        rows = self._quick(query, (policy, digest))
        return rows[0][0] if rows else None

    def in_quarantine(self, digests: Sequence[str]) -> set[tuple[str, str]]:
        """Return which revisions (policy, digest) with these digests are in quarantine."""
        stones = tables.quarantine.c
        query = select(stones.policy, stones.digest)
        if not digests:
            return set()
        with self._read(self._single) as connection:
            between = query.where(stones.digest.between(min(digests), max(digests)))
            return {(policy, digest) for policy, digest in connection.execute(between)}

    def release_quarantine(self, policy: str, digest: str) -> None:
        stones = tables.quarantine
        mine = (stones.c.policy == policy) & (stones.c.digest == digest)
        with self._write() as connection:
            connection.execute(delete(stones).where(mine))

    def move_revisions(
        self, moves: Sequence[tuple[Location, Location]], digests: Sequence[str] | None = None
    ) -> int:
        """Let every row that names the first place of a move name the second, in one transaction.

        `digests` (one for each move: whose bytes they are) spares reading the whole table. Returns
        how many rows have changed.
        """
        ids = self._intern(place.segment for move in moves for place in move)
        targets = {(ids[old.segment], old.offset): new for old, new in moves}
        columns = (table.digest, table.policy, table.segment, table.offset)
        query = select(*columns).where(table.segment.in_({segment for segment, _ in targets}))
        queries = [query]
        if digests is not None:
            wanted = [bytes.fromhex(digest) for digest in set(digests)]
            chunks = (wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK))
            queries = [query.where(table.digest.in_(chunk)) for chunk in chunks]
        with self._write() as connection:
            rows = [row for query in queries for row in connection.execute(query)]
            changes = [
                _placed(row.digest, row.policy, ids[new.segment], new)
                for row in rows
                if (new := targets.get((row.segment, row.offset)))
            ]
            if changes:
                connection.execute(_placing(MOVED), changes)
        return len(changes)

    def place_revisions(self, revisions: Sequence[Revision]) -> int:
        """Let the rows of known revisions name the whole bytes that these name, all in one transaction.

        They leave quarantine. Returns how many there were; one that is gone meanwhile stays so.
        """
        ids = self._intern(word for row in revisions for word in (row.layout, row.segment))
        changes = [
            _placed(bytes.fromhex(row.digest), row.policy, ids[row.segment], row)
            | {"new_layout": ids[row.layout]}
            for row in revisions
        ]
        if not changes:
            return 0
        with self._write() as connection:
            placed = connection.execute(_placing(PLACE), changes).rowcount
            lift_quarantine(connection, ((row.policy, row.digest) for row in revisions))
        return placed

    def unused_segments(self, segments: Collection[str]) -> set[str]:
        """Return those of these segments that no row names, now or later.

        The caller claims them, so that nobody appends to them; and who shares bytes in one needs a row
        that names it. Reads the whole table once, and keeps no writer waiting meanwhile.
        """
        self._settle()
        ids = self._intern(segments)
        query = select(table.segment).where(table.segment.in_(ids.values())).distinct()
        with self._read() as connection:
            used = set(connection.execute(query).scalars())
        return {segment for segment, id in ids.items() if id not in used}

    def _settle(self) -> None:
        """Wait for commits under way; have SQLite forget one that a kill cut short.

        Its frames may be whole in the write-ahead log though no reader sees them yet; once the log is
        recovered they would name bytes that are gone. A commit of our own takes their place in the log.
        """
        with self._write() as connection:
            if self._is_sqlite:
                version = connection.exec_driver_sql("PRAGMA user_version").scalar() or 0
                connection.exec_driver_sql(f"PRAGMA user_version = {(version + 1) % (1 << 31)}")

    # Purge

    def mark_purged(self, policy: str, by: str, now: float) -> dict[str, int]:
        """Mark a policy's name as purged and take policy and route away; return rows removed by table.

        From then on nothing of it is served, and nothing new is published.
        """
        mark = {"policy": policy, "by": by, "at": now}
        removed: dict[str, int] = {}
        with self._write() as connection:
            for name, column in (("policies", "name"), ("routes", "policy")):
                removed[name] = _delete(connection, name, column, policy)
            stone = self._insert(tables.purged).values(mark)
            # Of a name that was taken again the last purge counts; of one that is only purged, the first.
            if removed["policies"]:
                stone = stone.on_conflict_do_update(index_elements=["policy"], set_=mark)
            else:
                stone = stone.on_conflict_do_nothing()
            connection.execute(stone)
            self._tell(connection, policy)
        return removed

    def purge(self, policy: str, by: str, now: float) -> dict[str, int]:
        """Remove every row of a policy and mark its name as purged; return rows removed by table.

        Going on after a crash is safe: the mark comes first, so that nothing new is published, and
        tombstones go last, so that nothing buried is served meanwhile.
        """
        removed = self.mark_purged(policy, by, now) | {"revisions": 0}
        while rows := self._purge_revisions(policy):
            removed["revisions"] += rows
        for name in ("releases", "aliases", "notices", "quarantine", "tombstones"):
            with self._write() as connection:
                removed[name] = _delete(connection, name, "policy", policy)
                if removed[name] and name in TOLD:
                    self._tell(connection, policy)
        return removed

    def purged(self, policy: str) -> dict[str, Any] | None:
        """Return who purged a policy (`by`) and when (`at`); None when nobody did."""
        query = select(tables.purged).where(tables.purged.c.policy == policy)
        with self._read() as connection:
            row = connection.execute(query).one_or_none()
        return dict(row._mapping) if row else None

    def gone(self, policies: Collection[str]) -> set[str]:
        """Return which of these names were purged and are no policy's again."""
        names, there = list(policies), select(tables.policies.c.name)
        marks = tables.purged.c
        found: set[str] = set()
        with self._read() as connection:
            for at in range(0, len(names), CHUNK):
                query = select(marks.policy).where(
                    marks.policy.in_(names[at : at + CHUNK]),
                    ~there.where(tables.policies.c.name == marks.policy).exists(),
                )
                found.update(connection.execute(query).scalars())
        return found

    def _purge_revisions(self, policy: str) -> int:
        some = select(table.digest).where(table.policy == policy).limit(CHUNK)
        gone = delete(tables.revisions).where(table.digest == bindparam("key"), table.policy == policy)
        with self._write() as connection:
            digests = connection.execute(some).scalars().all()
            if digests:
                connection.execute(gone, [{"key": digest} for digest in digests])
                self._tell(connection, policy)
        return len(digests)

    def _found(self, policy: str, digest: str) -> Revision:
        row = self.find(policy, digest)
        if row is None:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")
        return row


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


def _routed(connection: Connection, policies: set[str]) -> set[tuple[str, str]]:
    routes = tables.routes.c
    columns = [routes[name] for name in ROUTED]
    found = connection.execute(select(routes.policy, *columns).where(routes.policy.in_(policies)))
    return {(row.policy, digest) for row in found for digest in row[1:] if digest}


def _released(connection: Connection, policies: set[str], running: bool) -> set[tuple[str, str]]:
    releases = tables.releases.c
    columns = [releases[name] for name in RELEASED]
    query = select(releases.policy, *columns).where(releases.policy.in_(policies)).distinct()
    found = connection.execute(query.where(releases.state == "running") if running else query)
    return {(row.policy, digest) for row in found for digest in row[1:] if digest}


def _buried(connection: Connection, policies: set[str]) -> set[tuple[str, str]]:
    stones = tables.tombstones.c
    in_force = stones.policy.in_(policies) & stones.lifted_at.is_(None)
    return {tuple(row) for row in connection.execute(select(stones.policy, stones.digest).where(in_force))}


def _delete(connection: Connection, name: str, column: str, policy: str) -> int:
    rows = tables.metadata.tables[name]
    return connection.execute(delete(rows).where(rows.c[column] == policy)).rowcount
