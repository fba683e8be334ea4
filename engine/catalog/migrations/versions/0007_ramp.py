"""A release's steps of weight, each with the route's version at its start."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column; a canary that is running has one step, which needs no entry."""
    op.add_column("releases", sa.Column("ramp", sa.JSON(), nullable=False, server_default="[]"))
