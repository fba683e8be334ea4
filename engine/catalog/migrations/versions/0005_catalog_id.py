"""The catalog's own id, by which a store names its owner."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the table with the catalog's id, and a random id."""
    table = op.create_table(
        "catalog",
        sa.Column("id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.bulk_insert(table, [{"id": uuid.uuid4().hex}])
