"""The audit log, whose entries can neither be changed nor deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
SAID = "entries of the audit log are never changed"


def upgrade() -> None:
    """Create the table and its triggers."""
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("on_behalf_of", sa.String),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("before", sa.String, nullable=False),
        sa.Column("after", sa.String, nullable=False),
        sa.Column("hash", sa.String, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_is_final() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{SAID}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_is_final BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "EXECUTE FUNCTION audit_is_final()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit "
            f"BEGIN SELECT RAISE(ABORT, '{SAID}'); END"
        )
