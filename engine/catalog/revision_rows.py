"""Rows of `revisions` in one open catalog: how a revision is written as a row, and how rows are read.

Rows are short: digests and checksums are bytes, strings that many rows share are ids of the table `names`.
Callers of the catalog never see that.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from sqlalchemy import select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import STATES, Revision
from engine.errors import AdapterError, Ambiguous, NotFound
from engine.settings.params import DIGEST12, POLICY_NAME
from engine.store.segments import Location

# Columns that say where and how a revision's bytes lie; the others describe the revision itself.
PLACE = ("layout", "segment", "offset", "length", "checksum")
# A row's values in the order of the fields of `Revision`.
COLUMNS = tuple(tables.revisions.c[field.name] for field in fields(Revision))
BASE, LAYOUT, SEGMENT, OWNER = (
    [column.name for column in COLUMNS].index(name) for name in ("base", "layout", "segment", "owner")
)
DIGEST_BYTES = 32
NO_DIGEST = "00" * DIGEST_BYTES
HEX = re.compile(r"[0-9a-f]*")
SNAPSHOT, EXPORTED = (STATES.index(state) for state in ("snapshot", "exported"))
# Up to so few digits a policy's own index is read: too many digests share the prefix.
SHORT_PREFIX = 3
CANDIDATES = 10
# Interned strings kept in memory; there may be many owners.
WORDS = 200_000
table = tables.revisions.c
# Among rows of the same time the last inserted is the newest.
NEWEST_FIRST = table.created_at.desc(), table.id.desc()


class Standing(NamedTuple):
    """A revision, and what withholds it: the reasons of its tombstone in force and of its quarantine."""

    revision: Revision
    tombstone: str | None
    quarantine: str | None


class RevisionRows:
    """Reads rows of `revisions` for the catalog's parts; caches interned strings, whose ids never change."""

    def __init__(self, access: Access):
        self._access = access
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        mark, names = access.mark, ", ".join(f'"{column.name}"' for column in COLUMNS)
        digits = "lower(hex(revisions.digest))" if access.is_sqlite else "encode(revisions.digest, 'hex')"
        withheld = f"(SELECT reason FROM {{}} WHERE policy = revisions.policy AND digest = {digits}{{}})"
        stones = withheld.format("tombstones", " AND lifted_at IS NULL"), withheld.format("quarantine", "")
        find = (
            f"SELECT {names}, {', '.join(stones)} FROM revisions WHERE digest >= {mark} AND digest <= {mark}"
        )
        # The expression rules out the index on policies, so that SQL uses the range of the key.
        self._find_by_prefix = f"{find} AND policy || '' = {mark} LIMIT {CANDIDATES + 1}"
        self._find_short = f"{find} AND policy = {mark} LIMIT {CANDIDATES + 1}"

    def select(self, query: Any) -> list[Revision]:
        """Return the revisions that a query of `COLUMNS` finds."""
        with self._access.read(self._access.single) as connection:
            rows = connection.execute(query).all()
        return self.decode(rows)

    def find(self, policy: str, digest: str) -> Revision | None:
        """Return the revision with this whole digest; None when there is none."""
        rows = self.select(select(*COLUMNS).where(*key_of(policy, digest)))
        return rows[0] if rows else None

    def standing(self, policy: str, digest_prefix: str) -> Standing | None:
        """Return the one revision whose digest starts with this prefix, and what withholds it, by one query.

        None when there is none. Raises `Ambiguous` with the candidates when there are several.
        """
        between = prefix_range(digest_prefix)
        if between is None or not POLICY_NAME.fullmatch(policy):
            return None
        query = self._find_by_prefix if len(digest_prefix) > SHORT_PREFIX else self._find_short
        rows = self._access.quick(query, (*between, policy))
        revisions = self.decode([row[: len(COLUMNS)] for row in rows])
        if len(revisions) > 1:
            raise _ambiguous(policy, digest_prefix, [row.digest for row in revisions[:CANDIDATES]])
        return Standing(revisions[0], *rows[0][len(COLUMNS) :]) if revisions else None

    def change(self, policy: str, digest: str, **values: Any) -> None:
        """Change a revision's row; `NotFound` when there is none."""
        with self._access.write() as connection:
            change = update(tables.revisions).where(*key_of(policy, digest)).values(values)
            done = connection.execute(change).rowcount
        if not done:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")

    def decode(self, rows: Sequence[Any]) -> list[Revision]:
        """Return the revisions of rows whose values are in the order of `COLUMNS`."""
        words = self.words({row[at] for row in rows for at in (BASE, LAYOUT, SEGMENT, OWNER)})
        return [decode(row, words) for row in rows]

    def intern(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ids of strings, adding new ones. Not within a write transaction."""
        words, known, table = set(names), self._ids, tables.names
        ids = {word: known[word] for word in words if word in known}
        missing = [word for word in words if word not in ids]
        if missing:
            with self._access.write() as connection:
                new = self._access.insert(table).on_conflict_do_nothing()
                connection.execute(new, [{"name": word} for word in missing])
                word_rows = tables.rows_among(connection, select(table), table.c.name, missing)
            ids |= self._remember(word_rows)
        return ids

    def words(self, ids: Collection[int]) -> dict[int, str]:
        """Return the strings of ids."""
        known, table = self._names, tables.names
        words = {id: known[id] for id in ids if id in known}
        if len(words) < len(ids):
            with self._access.read() as connection:
                unknown = (id for id in ids if id not in words)
                rows = tables.rows_among(connection, select(table), table.c.id, unknown)
            self._remember(rows)
            words |= {row.id: row.name for row in rows}
        return words

    def _remember(self, rows: Sequence[Any]) -> dict[str, int]:
        ids = {row.name: row.id for row in rows}
        if len(self._names) + len(ids) > WORDS:
            self._ids, self._names = {}, {}
        self._ids |= ids
        self._names |= {row.id: row.name for row in rows}
        return ids


def key_of(policy: str, digest: str) -> tuple[Any, Any]:
    """Return the two conditions that select a revision's row."""
    return table.digest == blob(digest), table.policy == policy


def location(row: Revision) -> Location:
    """Return where a row's bytes lie."""
    return Location(row.segment, row.offset, row.length, row.checksum)


def blob(digest: str) -> bytes | None:
    """Return a digest's bytes; None when it is not hex, so that it matches no row."""
    if HEX.fullmatch(digest) and len(digest) % 2 == 0:
        return bytes.fromhex(digest)
    return None


def prefix_range(prefix: str) -> tuple[bytes, bytes] | None:
    """Return the first and the last digest with this prefix; None when no digest can have it."""
    if not HEX.fullmatch(prefix) or len(prefix) > 2 * DIGEST_BYTES:
        return None
    first = prefix if len(prefix) % 2 == 0 else prefix + "0"
    return bytes.fromhex(first), bytes.fromhex(prefix.ljust(2 * DIGEST_BYTES, "f"))


def blobs(digests: Sequence[str | None], is_sqlite: bool) -> bytes | list[bytes | None]:
    """Return a column of digests as one parameter of a statement; in SQLite one blob, see `cut`."""
    if is_sqlite:
        return bytes.fromhex("".join([digest or NO_DIGEST for digest in digests]))
    return [bytes.fromhex(digest) if digest else None for digest in digests]


def cut(column: str, number: str) -> str:
    """Return the SQL that cuts digest `number` out of a parameter made by `blobs`."""
    return f"substr(:{column}, {DIGEST_BYTES} * {number} + 1, {DIGEST_BYTES})"


def words(row: Revision) -> tuple[str, str, str, str]:
    """Return the strings of a revision that its row holds as ids of `names`."""
    return row.base, row.layout, row.segment, row.owner


def encode(row: Revision, ids: Mapping[str, int]) -> tuple[Any, ...]:
    """Return a row's values in the order of `COLUMNS`; `ids` maps at least its `words`.

    Raises `AdapterError` when digest, parent or checksum is not hex, or the state is unknown.
    """
    try:
        return (
            row.policy,
            bytes.fromhex(row.digest),
            ids[row.base],
            bytes.fromhex(row.parent) if row.parent else None,
            row.step,
            row.rank,
            row.bytes,
            ids[row.layout],
            ids[row.segment],
            row.offset,
            row.length,
            bytes.fromhex(row.checksum),
            STATES.index(row.state),
            ids[row.owner],
            row.created_at,
            row.expires_at,
            None if row.probe is None else json.dumps(row.probe),
            row.retired_at,
            row.retired_by,
            row.retired_reason,
        )
    except ValueError:
        raise AdapterError(
            f"The digests {row.digest!r}, {row.parent!r} and {row.checksum!r} of a revision of "
            f"{row.policy!r} must be hexadecimal digits, its state {' or '.join(STATES)}, not {row.state!r}."
        ) from None


def decode(row: Any, names: Mapping[int, str]) -> Revision:
    """Return the revision of a row whose values are in the order of `COLUMNS`."""
    (policy, digest, base, parent, step, rank, size, layout, segment, offset) = row[:10]
    (length, checksum, state, owner, created_at, expires_at, probe, *retired) = row[10:]
    return Revision(
        policy,
        digest.hex(),
        names[base],
        parent and parent.hex(),
        step,
        rank,
        size,
        names[layout],
        names[segment],
        offset,
        length,
        checksum.hex(),
        STATES[state],
        names[owner],
        created_at,
        expires_at,
        json.loads(probe) if isinstance(probe, str) else probe,
        *retired,
    )


def _ambiguous(policy: str, digest_prefix: str, digests: Sequence[str]) -> Ambiguous:
    """Return the error for a prefix of several digests: it lists them, with enough digits to differ."""
    digits = DIGEST12
    while len({digest[:digits] for digest in digests}) < len(digests):
        digits += 1
    candidates = [f"{policy}@{digest[:digits]}" for digest in digests]
    return Ambiguous(
        f"Several revisions of {policy!r} begin with {digest_prefix!r}; give more digits. "
        f"Candidates: {', '.join(candidates)}.",
        candidates,
    )
