"""Puts an installation's catalog together: each process opens it here, with the audit log and suggestions."""

from engine.catalog.audit import record
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.suggestions import Suggestions
from engine.settings.params import Paths


def whole_catalog(url: str) -> Catalog:
    """Open a catalog with every optional part. Raises what `Catalog` raises."""
    return Catalog(url, record, Suggestions)


def open_catalog(paths: Paths, migrated: bool = False) -> Catalog:
    """Open an installation's catalog; `migrated` creates it first, or migrates it where it is a file.

    One in Postgres is migrated by the controller and `graftwork migrate` alone, since engines of the version
    before may share it. Raises what `Catalog` raises, and with `migrated` what `migrate` does.
    """
    if migrated:
        migrate(paths.catalog_url, even_shared=False)
    return whole_catalog(paths.catalog_url)
