"""Suspended tenants: since when, and why."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("tenants", sa.Column("suspended_at", sa.Float))
    op.add_column("tenants", sa.Column("suspended_for", sa.String))
