"""Puts an installation's catalog together: each process opens it here, with the audit log and suggestions."""

from engine.catalog.audit import record
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.suggestions import Suggestions
from engine.errors import Conflict
from engine.settings.params import Paths


def whole_catalog(url: str) -> Catalog:
    """Open a catalog with every optional part. Raises what `Catalog` raises."""
    return Catalog(url, record, Suggestions)


def open_catalog(paths: Paths, migrated: bool = False) -> Catalog:
    """Open an installation's catalog; `migrated` creates it first, or migrates it where it is a file.

    One in Postgres is migrated by the controller and `graftwork migrate` alone, since engines of the version
    before may share it. Raises what `refuse_unfinished` and `Catalog` raise, and with `migrated` what
    `migrate` does.
    """
    refuse_unfinished(paths)
    if migrated:
        migrate(paths.catalog_url, even_shared=False)
    return whole_catalog(paths.catalog_url)


def refuse_unfinished(paths: Paths) -> None:
    """Raise `Conflict` for a state directory that a restore has not finished."""
    if paths.restoring.is_dir():
        raise Conflict(
            f"A restore to {paths.root} has not finished. Run the same `graftwork backup restore` again: it "
            "goes on where it stopped."
        )
