"""Approvals, notes of MLflow aliases, notices."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add approvals to releases, and the tables of aliases and notices."""
    op.add_column("releases", sa.Column("approved", sa.JSON(), nullable=True))
    op.create_table(
        "aliases",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=True),
        sa.Column("digest", sa.String(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "alias"),
    )
    op.create_table(
        "notices",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("link", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("sent_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("notices_newest", "notices", ["at"])
    op.create_index(
        "notices_unsent",
        "notices",
        ["at"],
        sqlite_where=sa.text("sent_at IS NULL"),
        postgresql_where=sa.text("sent_at IS NULL"),
    )
