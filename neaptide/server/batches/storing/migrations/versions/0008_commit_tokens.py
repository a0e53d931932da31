"""Token of each server's last commit, which tells whether an interrupted COMMIT happened."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "commit_tokens",
        sa.Column("server", sa.String(64), primary_key=True),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
    )
