"""The index of the Tinker API: sessions, models, checkpoints, samplers, results."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "tinker_sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("finished", sa.String),
    )
    op.create_table(
        "tinker_models",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("session", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("policy", sa.String, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("targets", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("next_seq", sa.Integer, nullable=False),
        sa.Column("gathered", sa.Integer, nullable=False),
        sa.Column("corrupted", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("used_at", sa.Float, nullable=False),
    )
    op.create_index("tinker_models_newest", "tinker_models", ["tenant", "created_at"])
    op.create_table(
        "tinker_checkpoints",
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("stored", sa.String, nullable=False),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
    )
    op.create_index("tinker_checkpoints_newest", "tinker_checkpoints", ["tenant", "created_at"])
    op.create_table(
        "tinker_samplers",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("session", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("served", sa.String, nullable=False),
        sa.Column("path", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "tinker_results",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("tinker_results_oldest", "tinker_results", ["created_at"])
