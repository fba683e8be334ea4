"""Bases: the files of their text digest, and since when others than the first are accepted."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("bases", sa.Column("text_files", sa.JSON))
    op.add_column("bases", sa.Column("text_changed_at", sa.Float))
