"""Switches that people turn on and off for the whole installation, such as `freeze`."""

from sqlalchemy import select

from engine.catalog import tables
from engine.catalog.access import CatalogPart


class Switches(CatalogPart):
    """The catalog's switches; `catalog.switches`."""

    def is_on(self, name: str) -> bool:
        """Say whether a switch is on; one that was never set is off."""
        query = select(tables.switches.c.on).where(tables.switches.c.name == name)
        with self._access.read() as connection:
            return bool(connection.execute(query).scalar())

    def set(self, name: str, on: bool) -> None:
        """Turn a switch on or off."""
        row = self._access.insert(tables.switches).values(name=name, on=on)
        with self._access.write() as connection:
            self._access.record(connection, "switch.set", name, {"on": not on}, {"on": on})
            connection.execute(row.on_conflict_do_update(index_elements=["name"], set_={"on": on}))
