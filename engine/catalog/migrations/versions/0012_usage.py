"""Copies of the machines' usage: hourly sums with what is open, and when each log was last heard of."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "usage_logs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("turn", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.Float, nullable=False),
    )
    op.create_table(
        "usage_hours",
        sa.Column("log", sa.String, primary_key=True),
        sa.Column("hour", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("tenant", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("policy", sa.String, primary_key=True),
        sa.Column("revision", sa.String, primary_key=True),
        sa.Column("purpose", sa.String, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt", sa.BigInteger, nullable=False),
        sa.Column("completion", sa.BigInteger, nullable=False),
        sa.Column("unknown", sa.BigInteger, nullable=False),
        sa.Column("open", sa.BigInteger, nullable=False),
        sa.Column("reserved", sa.BigInteger, nullable=False),
    )
