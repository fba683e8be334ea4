"""The controller's own state: switches that people turn, notes of MLflow aliases, notices to deliver.

`engine/integrations/mlflow_aliases.py` compares the notes with the registry; notices are kept until
`engine/notifications/notices.py` has delivered them.
"""

import time

from sqlalchemy import delete, func, select, update

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.records import AliasNote, Notice


class Switches(CatalogPart):
    """Switches for the whole installation, such as `freeze`; `catalog.switches`."""

    def is_on(self, name: str) -> bool:
        """Say whether a switch is on; one that was never set is off."""
        query = select(tables.switches.c.on).where(tables.switches.c.name == name)
        return bool(self._access.scalar(query))

    def set(self, name: str, on: bool) -> None:
        """Turn a switch on or off."""
        row = self._access.insert(tables.switches).values(name=name, on=on)
        with self._access.write() as connection:
            self._access.record(connection, "switch.set", name, {"on": not on}, {"on": on})
            connection.execute(row.on_conflict_do_update(index_elements=["name"], set_={"on": on}))


class Aliases(CatalogPart):
    """What the controller last wrote or accepted for each alias; `catalog.aliases`."""

    def all(self) -> dict[tuple[str, str], AliasNote]:
        """Return the notes by policy and alias."""
        notes = self._access.all(AliasNote, select(tables.aliases))
        return {(note.policy, note.alias): note for note in notes}

    def note(self, policy: str, alias: str, version: str | None, digest: str | None) -> None:
        """Record what the controller wrote or accepted for an alias."""
        note = AliasNote(policy, alias, version, digest, time.time())
        self._access.change(self._access.put(tables.aliases, note))


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
        return int(self._access.scalar(query))

    def forget(self, before: float) -> int:
        """Remove notices from before a time (epoch seconds) that were delivered; return how many."""
        table = tables.notices.c
        old = delete(tables.notices).where(table.at < before, table.sent_at.is_not(None))
        return self._access.change(old)

    def mark_sent(self, ids: list[str]) -> None:
        """Mark notices as delivered."""
        sent = update(tables.notices).where(tables.notices.c.id.in_(ids))
        self._access.change(sent.values(sent_at=time.time()))
