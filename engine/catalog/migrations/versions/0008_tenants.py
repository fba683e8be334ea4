"""Keys with roles, policies, an expiry and limits; tenants; the installation's secret; kept unit hashes."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

# What the scope of an older key becomes.
ROLES = {"user": ["infer", "feedback"], "score": ["infer", "pin", "score"], "admin": ["admin"]}


def upgrade() -> None:
    """Add columns and table; a running release goes on with the unit hashes that it began with."""
    op.add_column("keys", sa.Column("id", sa.String(), nullable=False, server_default=""))
    op.add_column("keys", sa.Column("roles", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("keys", sa.Column("policies", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("keys", sa.Column("limits", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("keys", sa.Column("expires_at", sa.Float(), nullable=True))
    op.execute("UPDATE keys SET id = substr(hash, 1, 12)")
    keys = sa.table("keys", sa.column("scope", sa.String()), sa.column("roles", sa.JSON()))
    for scope, roles in ROLES.items():
        op.execute(keys.update().where(keys.c.scope == scope).values(roles=roles))
    op.drop_column("keys", "scope")
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "budgets",
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("drawn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject", "period"),
    )
    op.add_column("catalog", sa.Column("secret", sa.String(), nullable=False, server_default=""))
    catalog = sa.table("catalog", sa.column("secret", sa.String()))
    op.execute(catalog.update().values(secret=secrets.token_hex(32)))
    op.add_column("routes", sa.Column("plain_units", sa.Boolean(), nullable=False, server_default=sa.false()))
    routed = sa.table("routes", sa.column("policy", sa.String()), sa.column("plain_units", sa.Boolean()))
    releases = sa.table("releases", sa.column("policy", sa.String()), sa.column("state", sa.String()))
    running = sa.select(releases.c.policy).where(releases.c.state == "running")
    op.execute(routed.update().where(routed.c.policy.in_(running)).values(plain_units=True))
