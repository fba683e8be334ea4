"""Alembic's entry point: runs the migrations on the connection that `migrate` passes."""

from alembic import context

from engine.catalog.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
