"""The route version at which a release's canary started: evidence is selected by it, not by clocks."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column, and fill it for running canaries."""
    op.add_column("releases", sa.Column("canary_version", sa.Integer(), nullable=True))
    # A route has not changed since its running canary started.
    op.execute(
        "UPDATE releases SET canary_version = (SELECT version FROM routes"
        " WHERE routes.policy = releases.policy AND routes.canary = releases.revision)"
        " WHERE state = 'running' AND canary_started_at IS NOT NULL"
    )
