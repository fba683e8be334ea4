"""Room for a million adapters: short rows, retirement, quarantine, purged names, the change feed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

PAGE = 1000
INTERNED = ("base", "layout", "segment", "owner")
STATES = ("snapshot", "exported")
CARRIED = (
    *("policy", "digest", "base", "parent", "step", "rank", "bytes", "layout", "segment", "offset"),
    *("length", "checksum", "state", "owner", "created_at", "expires_at"),
)


def upgrade() -> None:
    """Add the tables of words, quarantine, purges and changes; copy the revisions into short rows."""
    op.create_table(
        "names",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "quarantine",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "digest"),
    )
    op.create_table(
        "purged",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("by", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("policy"),
    )
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("policy", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("routes_newest", "routes", ["updated_at"])
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # Byte order, as in SQLite, so that names with one prefix are a range.
        op.alter_column("policies", "name", type_=sa.String(collation="C"))
    op.drop_index("revisions_newest", "revisions")
    op.drop_index("revisions_expiring", "revisions")
    op.rename_table("revisions", "revisions_0002")
    if connection.dialect.name == "postgresql":
        op.execute("ALTER INDEX revisions_pkey RENAME TO revisions_0002_pkey")
    _create_revisions()
    _carry_over(connection)
    op.drop_table("revisions_0002")
    op.create_index("revisions_newest", "revisions", ["policy", "created_at", "digest"])
    _create_partial_index("revisions_expiring", ["expires_at"], "expires_at IS NOT NULL")
    _create_partial_index("revisions_children", ["parent", "policy"], "parent IS NOT NULL")


def _create_revisions() -> None:
    op.create_table(
        "revisions",
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
        sa.PrimaryKeyConstraint("digest", "policy"),
        sqlite_with_rowid=False,
    )


def _create_partial_index(name: str, columns: list[str], where: str) -> None:
    rows = sa.text(where)
    op.create_index(name, "revisions", columns, sqlite_where=rows, postgresql_where=rows)


def _carry_over(connection: sa.Connection) -> None:
    old, new = _rows("revisions_0002"), _rows("revisions")
    names = sa.table("names", sa.column("id"), sa.column("name"))
    for column in INTERNED:
        known = sa.select(names.c.name)
        words = sa.select(old.c[column]).where(old.c[column].not_in(known)).distinct()
        connection.execute(names.insert().from_select(["name"], words))
    ids = {row.name: row.id for row in connection.execute(sa.select(names))}
    key = (old.c.policy, old.c.digest)
    after = ("", "")
    while page := connection.execute(
        sa.select(old).where(sa.tuple_(*key) > after).order_by(*key).limit(PAGE)
    ).all():
        connection.execute(new.insert(), [_short(dict(row._mapping), ids) for row in page])
        after = (page[-1].policy, page[-1].digest)


def _rows(name: str) -> sa.TableClause:
    return sa.table(name, *map(sa.column, CARRIED), sa.column("probe", sa.JSON(none_as_null=True)))


def _short(row: dict[str, object], ids: dict[str, int]) -> dict[str, object]:
    blobs = {name: bytes.fromhex(str(row[name])) for name in ("digest", "checksum")}
    parent = bytes.fromhex(str(row["parent"])) if row["parent"] else None
    words = {name: ids[str(row[name])] for name in INTERNED}
    return row | blobs | words | {"parent": parent, "state": STATES.index(str(row["state"]))}
