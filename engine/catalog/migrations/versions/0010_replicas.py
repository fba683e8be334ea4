"""The engines of a catalog, and which revisions under release each has loaded."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "replicas",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("base", sa.String, nullable=False),
        sa.Column("version", sa.String, nullable=False),
        sa.Column("incarnation", sa.String, nullable=False),
        sa.Column("beats", sa.Integer, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("draining", sa.Boolean, nullable=False),
    )
    op.create_table(
        "replica_loads",
        sa.Column("replica", sa.String, primary_key=True),
        sa.Column("policy", sa.String, primary_key=True),
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("fault", sa.String),
    )
