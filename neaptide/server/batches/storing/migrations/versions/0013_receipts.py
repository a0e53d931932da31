"""Device time of batches and keys, and the receipts of ended batches."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch_costs",
        sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("server_run", sa.String(16), primary_key=True),
        sa.Column("sums", sa.Text, nullable=False),
    )
    op.create_table(
        "batch_receipts",
        sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("receipt", sa.Text, nullable=False),
    )
    op.create_table(
        "key_costs",
        sa.Column("server_run", sa.String(16), primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("work", sa.String(16), primary_key=True),
        sa.Column("device_s", sa.Double, nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger, nullable=False),
        sa.Column("decode_tokens", sa.BigInteger, nullable=False),
    )
