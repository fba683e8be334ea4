"""Alembic migrations of the catalog; `engine.catalog.catalog.migrate` runs them."""
