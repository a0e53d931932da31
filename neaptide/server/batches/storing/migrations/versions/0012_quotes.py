"""Ten-minute aggregates of the traffic, and the moment by which a batch was promised."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("due_at", sa.BigInteger))
    op.create_table(
        "traffic_periods",
        sa.Column("server", sa.String(64), primary_key=True),
        sa.Column("start_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("counts", sa.Text, nullable=False),
    )
