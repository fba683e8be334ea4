"""Notes of MLflow aliases: what the controller last wrote or accepted for each.

`engine/integrations/mlflow_aliases.py` compares them with the registry.
"""

import time

from sqlalchemy import select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.records import AliasNote


class Aliases:
    """The catalog's alias notes; `catalog.aliases`."""

    def __init__(self, access: Access):
        self._access = access

    def all(self) -> dict[tuple[str, str], AliasNote]:
        """Return the notes by policy and alias."""
        with self._access.read() as connection:
            rows = connection.execute(select(tables.aliases)).all()
        return {(row.policy, row.alias): AliasNote(**row._mapping) for row in rows}

    def note(self, policy: str, alias: str, version: str | None, digest: str | None) -> None:
        """Record what the controller wrote or accepted for an alias."""
        note = AliasNote(policy, alias, version, digest, time.time())
        row = self._access.put(tables.aliases, note)
        with self._access.write() as connection:
            connection.execute(row)
