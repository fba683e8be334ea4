"""Layouts: the headers that packed adapters share, by the sha256 of their body."""

from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import select

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.errors import AdapterError, NotFound


@dataclass(frozen=True)
class Layout:
    """A layout's body and its sha256, in hex."""

    digest: str
    body: str


class Layouts(CatalogPart):
    """The catalog's layouts; `catalog.layouts`."""

    def add(self, digest: str, body: str) -> None:
        """Add a layout by the sha256 of its body; a damaged body is replaced."""
        self._access.change(self._access.put(tables.layouts, Layout(digest, body)))

    def get(self, digest: str) -> str:
        """Return a layout's body; `NotFound` when there is none, `AdapterError` when it fails its digest."""
        query = select(tables.layouts.c.body).where(tables.layouts.c.digest == digest)
        with self._access.read() as connection:
            body: str | None = connection.execute(query).scalar()
        if body is None:
            raise NotFound(f"There is no layout {digest[:12]} in the catalog.")
        # Whole bytes read by another layout would be other weights.
        if sha256(body.encode()).hexdigest() != digest:
            raise AdapterError(f"The layout {digest[:12]} is damaged. Export the revision again.")
        return body
