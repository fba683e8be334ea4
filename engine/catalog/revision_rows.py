"""Rows of `revisions` in one open catalog: reading them, and interning their long strings as short ids."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Column, Connection, select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import STATES, Revision
from engine.catalog.row_codec import BASE, COLUMNS, LAYOUT, OWNER, SEGMENT, blob, decode
from engine.errors import NotFound

SNAPSHOT, EXPORTED = (STATES.index(state) for state in ("snapshot", "exported"))
# Interned strings kept in memory; there may be many owners.
WORDS = 200_000
# Strings in one query: a statement has a limit of parameters.
CHUNK = 1000
table = tables.revisions.c
# Among rows of the same time the last inserted is the newest.
NEWEST_FIRST = table.created_at.desc(), table.id.desc()


class RevisionRows:
    """Reads rows of `revisions` for the catalog's parts; caches interned strings, whose ids never change."""

    def __init__(self, access: Access):
        self._access = access
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def select(self, query: Any) -> list[Revision]:
        """Return the revisions that a query of `COLUMNS` finds."""
        with self._access.read(self._access.single) as connection:
            rows = connection.execute(query).all()
        return self.decode(rows)

    def find(self, policy: str, digest: str) -> Revision | None:
        """Return the revision with this whole digest; None when there is none."""
        rows = self.select(select(*COLUMNS).where(*key_of(policy, digest)))
        return rows[0] if rows else None

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

    def intern(self, wanted: Iterable[str]) -> dict[str, int]:
        """Return the ids of strings, adding new ones. Not within a write transaction."""
        words, known, table = set(wanted), self._ids, tables.names
        ids = {word: known[word] for word in words if word in known}
        missing = [word for word in words if word not in ids]
        if missing:
            with self._access.write() as connection:
                new = self._access.insert(table).on_conflict_do_nothing()
                connection.execute(new, [{"name": word} for word in missing])
                found = _named(connection, table.c.name, missing)
            ids |= self._remember(found)
        return ids

    def words(self, ids: Collection[int]) -> dict[int, str]:
        """Return the strings of ids."""
        known, table = self._names, tables.names
        words = {id: known[id] for id in ids if id in known}
        if len(words) < len(ids):
            with self._access.read() as connection:
                found = _named(connection, table.c.id, [id for id in ids if id not in words])
            self._remember(found)
            words |= {row.id: row.name for row in found}
        return words

    def _remember(self, found: Sequence[Any]) -> dict[str, int]:
        ids = {row.name: row.id for row in found}
        if len(self._names) + len(ids) > WORDS:
            self._ids, self._names = {}, {}
        self._ids |= ids
        self._names |= {row.id: row.name for row in found}
        return ids


def key_of(policy: str, digest: str) -> tuple[Any, Any]:
    """Return the two conditions that select a revision's row."""
    return table.digest == blob(digest), table.policy == policy


def _named(connection: Connection, column: Column[Any], wanted: Sequence[Any]) -> list[Any]:
    """Return the rows of `names` with one of these values in a column."""
    query = select(tables.names)
    chunks = (wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK))
    return [row for chunk in chunks for row in connection.execute(query.where(column.in_(chunk)))]
