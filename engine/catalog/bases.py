"""Bases: the frozen models that policies are trained on, by digest."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import select

from engine.base.text_files import changed_files, text_digest
from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.records import Base
from engine.errors import BaseModelError, NotFound

if TYPE_CHECKING:
    from engine.base.resident import BaseInfo


class Bases(CatalogPart):
    """The catalog's bases; `catalog.bases`."""

    def add(self, base: Base, accepted: str | None = None) -> None:
        """Add a base; of a known one only the path is replaced: its files may have moved.

        The first `texts` that are given become its own. Raises `BaseModelError` for others, unless their text
        digest begins with `accepted`: they are then in force, which the audit log notes.
        """
        columns = tables.bases.c
        query = self._access.insert(tables.bases).values(**vars(base))
        update = tables.bases.update().where(columns.digest == base.digest)
        with self._access.write() as connection:
            connection.execute(
                query.on_conflict_do_update(index_elements=["digest"], set_={"path": base.path})
            )
            texts = connection.execute(
                select(columns.texts).where(columns.digest == base.digest)
            ).scalar_one()
            if base.texts and base.texts[-1:] != texts[-1:]:
                if texts:
                    refuse_changed(base.name, texts[-1], base.texts[-1], accepted)
                    before, after = {"text_files": texts[-1]}, {"text_files": base.texts[-1]}
                    self._access.record(connection, "base.text", base.digest, before, after)
                connection.execute(update.values(texts=[*texts, base.texts[-1]]))

    def register(self, base: "BaseInfo", accepted: str | None = None) -> None:
        """Add a base that is ready to be loaded. Raises as `add`."""
        self.add(Base(base.digest, base.name, str(base.path), time.time(), [dict(base.text_files)]), accepted)

    def check_text(self, base: "BaseInfo") -> None:
        """Raise `BaseModelError` where a base has other text files than those in force.

        For commands that render prompts beside services that run. A base that is not known yet passes.
        """
        row = self._find(base.digest)
        if row is not None and row.texts:
            refuse_changed(base.name, row.texts[-1], base.text_files)

    def get(self, digest: str) -> Base:
        """Return a base; `NotFound` when the catalog does not have it."""
        base = self._find(digest)
        if base is None:
            raise NotFound(f"There is no base {digest[:12]} in the catalog.")
        return base

    def _find(self, digest: str) -> Base | None:
        return self._access.one(Base, select(tables.bases).where(tables.bases.c.digest == digest))

    def names(self) -> dict[str, str]:
        """Return the names of the known bases by digest."""
        query = select(tables.bases.c.digest, tables.bases.c.name)
        with self._access.read() as connection:
            return {row.digest: row.name for row in connection.execute(query)}


def refuse_changed(
    name: str, before: Mapping[str, str], texts: Mapping[str, str], accepted: str | None = None
) -> None:
    """Raise `BaseModelError` where a base's text files are not the known ones, unless they are accepted."""
    changed, digest = changed_files(before, texts), text_digest(texts)
    if changed and not (accepted and digest.startswith(accepted)):
        raise BaseModelError(
            f"The base {name!r} is not the one that its revisions were trained and scored with: "
            f"{', '.join(changed)} changed. Restore these files, or accept them: set base.text_digest to "
            f"{digest[:12]} and restart the services. Scores from before are then not compared with new "
            "ones. Create policies anew whose suites have prompts of another template."
        )
