"""Alembic migrations of the catalog; `engine.adapters.catalog.migrate` runs them."""
