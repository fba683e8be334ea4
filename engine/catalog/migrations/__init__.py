"""Alembic migrations of the catalog, run by `engine.catalog.catalog.migrate`."""
