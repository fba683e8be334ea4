"""Bases: the files of their text digests."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the column."""
    op.add_column("bases", sa.Column("texts", sa.JSON, nullable=False, server_default="[]"))
