"""Revisions in insertion order: in the order of digests each new row changed a page of its own."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

INDEXES = ("revisions_newest", "revisions_expiring", "revisions_children")


def upgrade() -> None:
    """Copy the revisions into a table without digests as its key."""
    for index in INDEXES:
        op.drop_index(index, "revisions")
    op.rename_table("revisions", "revisions_0003")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX revisions_pkey RENAME TO revisions_0003_pkey")
    op.create_table(
        "revisions",
        sa.Column("id", sa.Integer(), nullable=False),
        *_columns(),
        sa.PrimaryKeyConstraint("id"),
    )
    _carry_over()
    op.drop_table("revisions_0003")
    op.create_index("revisions_key", "revisions", ["digest", "policy"], unique=True)
    op.create_index("revisions_newest", "revisions", ["policy", "created_at", "id"])
    _create_partial_index("revisions_expiring", ["expires_at"], "expires_at IS NOT NULL")
    _create_partial_index("revisions_children", ["parent", "policy"], "parent IS NOT NULL")


def _columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("base", sa.Integer(), nullable=False),
        sa.Column("parent", sa.LargeBinary(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("layout", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("owner", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("probe", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("retired_at", sa.Float(), nullable=True),
        sa.Column("retired_by", sa.String(), nullable=True),
        sa.Column("retired_reason", sa.String(), nullable=True),
    ]


def _carry_over() -> None:
    """Copy the rows in the order that lists show: by time, then by digest."""
    names = [column.name for column in _columns()]
    old, new = (sa.table(table, *map(sa.column, names)) for table in ("revisions_0003", "revisions"))
    rows = sa.select(*old.c).order_by(old.c.created_at, old.c.digest)
    op.execute(new.insert().from_select(names, rows))


def _create_partial_index(name: str, columns: list[str], where: str) -> None:
    rows = sa.text(where)
    op.create_index(name, "revisions", columns, sqlite_where=rows, postgresql_where=rows)
