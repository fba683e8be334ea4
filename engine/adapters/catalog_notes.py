"""What the controller notes for later: aliases as it last wrote them, notices that wait to be sent.

Knows rows only; `engine/aliases.py` and `engine/notices.py` know what they mean.
"""

import time

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.sqlite import insert

from engine.adapters import catalog_schema as schema
from engine.adapters.catalog_access import Access
from engine.adapters.catalog_schema import AliasNote, Notice


class Notes(Access):
    """The catalog's notes; part of `Catalog`."""

    def alias_notes(self) -> dict[tuple[str, str], AliasNote]:
        """Return the notes by policy and alias."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(schema.aliases)).all()
        return {(row.policy, row.alias): AliasNote(**row._mapping) for row in rows}

    def note_alias(self, policy: str, alias: str, version: str | None, digest: str | None) -> None:
        """Remember what the controller wrote or accepted for an alias."""
        note = AliasNote(policy, alias, version, digest, time.time())
        row = insert(schema.aliases).prefix_with("OR REPLACE").values(**vars(note))
        with self._write() as connection:
            connection.execute(row)

    def forget_aliases(self, policy: str) -> None:
        with self._write() as connection:
            connection.execute(delete(schema.aliases).where(schema.aliases.c.policy == policy))

    def add_notice(self, notice: Notice) -> bool:
        """Keep a notice until it is sent; return whether it is new."""
        row = insert(schema.notices).values(**vars(notice)).on_conflict_do_nothing()
        with self._write() as connection:
            return bool(connection.execute(row).rowcount)

    def notices(self, limit: int = 100, unsent: bool = False) -> list[Notice]:
        """Return notices, newest first; with `unsent`, those that wait, oldest first."""
        table = schema.notices.c
        query = select(schema.notices).order_by(table.at.asc() if unsent else table.at.desc()).limit(limit)
        if unsent:
            query = query.where(table.sent_at.is_(None))
        with self._engine.connect() as connection:
            return [Notice(**row._mapping) for row in connection.execute(query)]

    def newest_notice(self, name: str) -> Notice | None:
        table = schema.notices.c
        query = select(schema.notices).where(table.name == name).order_by(table.at.desc()).limit(1)
        return self._one(Notice, query)

    def mark_sent(self, ids: list[str]) -> None:
        change = update(schema.notices).where(schema.notices.c.id.in_(ids)).values(sent_at=time.time())
        with self._write() as connection:
            connection.execute(change)
