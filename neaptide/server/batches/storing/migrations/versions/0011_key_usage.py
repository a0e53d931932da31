"""What each API key has used of its limits."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "key_usage",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("counts", sa.Text, nullable=False),
        sa.Column("changed_at_ms", sa.BigInteger, nullable=False),
    )
