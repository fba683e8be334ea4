"""Notices for people and automations, kept until `engine/notifications/notices.py` has delivered them."""

import time

from sqlalchemy import delete, func, select, update

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.records import Notice


class Notices(CatalogPart):
    """The catalog's notices; `catalog.notices`."""

    def add(self, notice: Notice) -> bool:
        """Store a notice until it is sent; return whether it is new."""
        return self._access.change(self._access.new(tables.notices, notice)) > 0

    def page(self, limit: int = 100, unsent: bool = False) -> list[Notice]:
        """Return notices, newest first; with `unsent` only those not sent yet, oldest first."""
        table = tables.notices.c
        query = select(tables.notices).order_by(table.at.asc() if unsent else table.at.desc()).limit(limit)
        return self._access.all(Notice, query.where(table.sent_at.is_(None)) if unsent else query)

    def newest(self, name: str) -> Notice | None:
        """Return the newest notice of this name; None when there is none."""
        table = tables.notices.c
        query = select(tables.notices).where(table.name == name).order_by(table.at.desc()).limit(1)
        return self._access.one(Notice, query)

    def count_unsent(self) -> int:
        """Return how many notices wait to be sent."""
        query = select(func.count()).select_from(tables.notices).where(tables.notices.c.sent_at.is_(None))
        with self._access.read() as connection:
            return int(connection.execute(query).scalar_one())

    def forget(self, before: float) -> int:
        """Remove notices from before a time (epoch seconds) that were delivered; return how many."""
        table = tables.notices.c
        old = delete(tables.notices).where(table.at < before, table.sent_at.is_not(None))
        return self._access.change(old)

    def mark_sent(self, ids: list[str]) -> None:
        """Mark notices as delivered."""
        sent = update(tables.notices).where(tables.notices.c.id.in_(ids))
        self._access.change(sent.values(sent_at=time.time()))
