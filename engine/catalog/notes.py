"""What the controller notes for later: aliases as it last wrote them, notices that wait to be sent.

Knows rows only; `mlflow_aliases` and `notifications` in `engine/controller/` know what they mean.
"""

import time

from sqlalchemy import delete, select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import AliasNote, Notice


class Notes(Access):
    """The catalog's notes; part of `Catalog`."""

    def alias_notes(self) -> dict[tuple[str, str], AliasNote]:
        """Return the notes by policy and alias."""
        with self._read() as connection:
            rows = connection.execute(select(tables.aliases)).all()
        return {(row.policy, row.alias): AliasNote(**row._mapping) for row in rows}

    def note_alias(self, policy: str, alias: str, version: str | None, digest: str | None) -> None:
        """Remember what the controller wrote or accepted for an alias."""
        note = AliasNote(policy, alias, version, digest, time.time())
        row = self._put(tables.aliases, note)
        with self._write() as connection:
            connection.execute(row)

    def forget_aliases(self, policy: str) -> None:
        with self._write() as connection:
            connection.execute(delete(tables.aliases).where(tables.aliases.c.policy == policy))

    def add_notice(self, notice: Notice) -> bool:
        """Keep a notice until it is sent; return whether it is new."""
        row = self._new(tables.notices, notice)
        with self._write() as connection:
            return bool(connection.execute(row).rowcount)

    def notices(self, limit: int = 100, unsent: bool = False) -> list[Notice]:
        """Return notices, newest first; with `unsent`, those that wait, oldest first."""
        table = tables.notices.c
        query = select(tables.notices).order_by(table.at.asc() if unsent else table.at.desc()).limit(limit)
        if unsent:
            query = query.where(table.sent_at.is_(None))
        with self._read() as connection:
            return [Notice(**row._mapping) for row in connection.execute(query)]

    def newest_notice(self, name: str) -> Notice | None:
        table = tables.notices.c
        query = select(tables.notices).where(table.name == name).order_by(table.at.desc()).limit(1)
        return self._one(Notice, query)

    def mark_sent(self, ids: list[str]) -> None:
        change = update(tables.notices).where(tables.notices.c.id.in_(ids)).values(sent_at=time.time())
        with self._write() as connection:
            connection.execute(change)
