"""Chunks of batches that servers lease, and the chunk of each line; null for lines that are not leased."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batch_lines", sa.Column("chunk_no", sa.Integer))
    op.create_table(
        "batch_chunks",
        sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("chunk_no", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("deadline_class", sa.BigInteger, nullable=False),
        sa.Column("density", sa.Double, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
        sa.Column("leased_until_ms", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.create_index("batch_chunks_in_order", "batch_chunks", ["deadline_class", "density"])
