"""Notes of MLflow aliases: what the controller last wrote or accepted for each.

`engine/integrations/mlflow_aliases.py` compares them with the registry.
"""

import time

from sqlalchemy import select

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.records import AliasNote


class Aliases(CatalogPart):
    """The catalog's alias notes; `catalog.aliases`."""

    def all(self) -> dict[tuple[str, str], AliasNote]:
        """Return the notes by policy and alias."""
        notes = self._access.all(AliasNote, select(tables.aliases))
        return {(note.policy, note.alias): note for note in notes}

    def note(self, policy: str, alias: str, version: str | None, digest: str | None) -> None:
        """Record what the controller wrote or accepted for an alias."""
        note = AliasNote(policy, alias, version, digest, time.time())
        self._access.change(self._access.put(tables.aliases, note))
